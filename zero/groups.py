"""The parameter groups of a user's optimizer, before and after they hold pieces instead of parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .bucket import Bucket, Slot
from .parameter import ManagedParameter

EQUAL_OPTIONS = (  # on all ranks: the rule that an error tells
    "must be equal at every step (call scheduler.step on all ranks alike, with a loss that is equal on all, as that of "
    "execute_pipeline is)"
)


def managed_groups(
    optimizer: Optimizer, parameters: Sequence[ManagedParameter]
) -> list[list[ManagedParameter]]:
    """The parameters that the optimizer trains here, per group, in its order.

    What it holds besides is left out: the parameters of other pipeline stages, and frozen ones.

    Raises:
        ValueError: a parameter or a name is listed twice, one is complex, or the optimizer has stepped one.
    """
    by_identity = _by_identity(parameters)
    groups = []
    for group in optimizer.param_groups:
        held = [by_identity[id(each)] for each in group["params"] if id(each) in by_identity]
        groups.append([managed for managed in held if managed.parameter.requires_grad])
    for managed in (managed for members in groups for managed in members):
        if managed.parameter.is_complex():
            raise ValueError(
                f"{managed.name} is {managed.parameter.dtype}, and gradients and masters are float32: use a real "
                "parameter with a last dimension of 2, and torch.view_as_complex in forward"
            )
        if not _is_fresh(optimizer.state.get(managed.parameter, {})):
            raise ValueError(
                f"{type(optimizer).__name__} already has state for {managed.name}, which would be lost: "
                "call boost before the first step, and load optimizer states after it"
            )
    return groups


def optimizer_options(optimizer: Optimizer | None) -> dict[str, Any]:
    """The class of an optimizer, and what its groups say but for the parameters, by name."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = {
        f"{name} of group {index}": value
        for index, group in enumerate(groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    return {"class": None if optimizer is None else type(optimizer).__qualname__, **options}


def hold_pieces(optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
    """Give the optimizer this rank's pieces in the place of the parameters, in the same group dicts."""
    for index, group in enumerate(optimizer.param_groups):
        slots = [slot for bucket in buckets if bucket.group_index == index for slot in bucket.slots]
        group["params"][:] = [slot.piece for slot in slots if slot.piece is not None]
        if "param_names" in group:
            group["param_names"][:] = [slot.managed.name for slot in slots if slot.piece is not None]
    state: dict[Tensor, dict[str, Any]] = {
        slot.piece: _state_of_piece(optimizer, slot)
        for bucket in buckets
        for slot in bucket.slots
        if slot.piece is not None and slot.parameter in optimizer.state
    }
    optimizer.state.clear()
    optimizer.state.update(state)


def _by_identity(parameters: Sequence[ManagedParameter]) -> dict[int, ManagedParameter]:
    found: dict[int, ManagedParameter] = {}
    for managed in parameters:
        other = found.setdefault(id(managed.parameter), managed)
        if other is not managed:
            raise ValueError(
                f"{other.name} and {managed.name} are one parameter: list a tied parameter under one name"
            )
    names = [managed.name for managed in parameters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two parameters are both named {', '.join(sorted(twice))}: names must be unique")
    return found


def _is_fresh(state: dict[str, Any]) -> bool:
    """Whether a state is as the constructor leaves it: most leave none, Adagrad leaves constants."""
    return not state or ("step" in state and float(state["step"]) == 0)


def _state_of_piece(optimizer: Optimizer, slot: Slot) -> dict[str, Any]:
    assert slot.piece is not None
    # A number of its own is the count of steps; another one belongs to a parameter that is a number.
    return {
        key: _piece_of_constant(value, slot.piece)
        if isinstance(value, Tensor) and (value.dim() or (not slot.weight.dim() and key != "step"))
        else value
        for key, value in optimizer.state[slot.parameter].items()
    }


def _piece_of_constant(value: Tensor, piece: Parameter) -> Tensor:
    constant = value.flatten()[0]
    if not bool((value == constant).all()):
        raise AssertionError(f"the state of a parameter before the first step is not one number: {value}")
    return torch.full_like(piece, constant.item(), requires_grad=False)
