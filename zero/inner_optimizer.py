"""The user's optimizer inside a sharded one: its groups, its states, and the local state that a rank saves."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..cluster.gathering import require_equal
from ..cluster.placement import shape_of_owner
from .bucket import Bucket
from .combined import members_of, name_of
from .owned import OwnedParameters
from .partition import ManagedParameter
from .precision import DynamicScaler
from .reducer import sums_in_order
from .slot import Slot

EQUAL_OPTIONS = (  # the rule for all ranks, quoted in errors
    "must be equal at every step (call scheduler.step on all ranks alike, with a loss that is equal on all, as that of "
    "execute_pipeline is)"
)
NOT_PICKLED = (
    "a boosted optimizer cannot be copied or pickled, since its parameters and process groups cannot: call "
    "booster.save_optimizer(optimizer, folder) on every rank, or copy the optimizer before boost"
)
PARTIAL_STATE = (
    "this rank has only a part of this optimizer's state, so state_dict() would be incomplete: call "
    "booster.save_optimizer(optimizer, folder) or booster.save_checkpoint on every rank"
)

# Optimizers of torch.optim with a fused kernel on some device types.
_FUSED: dict[type[Optimizer], str] = {
    torch.optim.Adagrad: "aten::_fused_adagrad_",
    torch.optim.Adam: "aten::_fused_adam_",
    torch.optim.AdamW: "aten::_fused_adamw_",
    torch.optim.SGD: "aten::_fused_sgd_",
}


class StepGuard:
    """Context in which a boosted inner optimizer may step; outside of it, stepping it raises RuntimeError."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._is_entered = False
        for guarded in {optimizer, *members_of(optimizer)}:
            guarded.register_step_pre_hook(self._require_entered)

    def __enter__(self) -> None:
        self._is_entered = True

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def _require_entered(self, *_: Any) -> None:
        """Raise RuntimeError for a step outside of this context; a hook of the optimizer."""
        if not self._is_entered:
            raise RuntimeError(
                "this optimizer was boosted: step the one that boost returned, which reduces gradients and removes the "
                "loss scale"
            )


class OptimizerWrapper(Optimizer):
    """Optimizer with the groups, states, defaults and hooks of an inner optimizer, which only it may step.

    Args:
        optimizer: the inner optimizer.
    """

    # The base class is not initialized: its constructor would make groups.
    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self._guard = StepGuard(optimizer)
        # Hooks registered on this optimizer run with those of the inner optimizer.
        self.__dict__.update(
            {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by piece."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the layout of the flat memory is fixed."""
        raise RuntimeError("parameter groups cannot be added to a boosted optimizer: add them before boost")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_PICKLED)


def managed_groups(
    optimizer: Optimizer, parameters: Sequence[ManagedParameter]
) -> list[list[ManagedParameter]]:
    """Return this rank's trained parameters per group, in the order of the optimizer.

    Frozen parameters and those of other pipeline stages are left out.

    Raises:
        ValueError: a parameter or a name is listed twice, one is complex, or the optimizer has stepped one.
    """
    by_identity = _by_identity(parameters)
    groups = []
    for group in optimizer.param_groups:
        local = [by_identity[id(tensor)] for tensor in group["params"] if id(tensor) in by_identity]
        groups.append([managed for managed in local if managed.parameter.requires_grad])
    for managed in (managed for members in groups for managed in members):
        if managed.parameter.is_complex():
            raise ValueError(
                f"{managed.name} is {managed.parameter.dtype}, but gradients and masters are float32: use a real "
                "parameter with a last dimension of 2, and torch.view_as_complex in forward"
            )
        if not _is_fresh(optimizer.state.get(managed.parameter, {})):
            raise ValueError(
                f"{type(optimizer).__name__} already has state for {managed.name}, which would be lost: "
                "call boost before the first step, and load optimizer states after it"
            )
    return groups


def require_one_layout(groups: Sequence[Sequence[ManagedParameter]], *, group: dist.ProcessGroup) -> None:
    """Require equal parameters on the ranks of the data axis, and equal shapes in each sum group. Collective over both.

    Args:
        groups: the trained parameters by parameter group.
        group: the data axis.

    Raises:
        ValueError: they differ; on every rank.
    """
    lines = [
        f"{managed.name} {shape_of_owner(managed.parameter)} of group {index}"
        for index, members in enumerate(groups)
        for managed in members
    ]
    _require_equal_lines(lines, group, what="the trainable parameters of the optimizer")
    flat = [managed for members in groups for managed in members]
    for _, summing, indices in sums_in_order(flat):
        shapes = [str(tuple(flat[index].parameter.shape)) for index in indices]
        _require_equal_lines(shapes, summing, what="the shapes of parameters whose gradients are summed")


def _require_equal_lines(lines: list[str], group: dist.ProcessGroup, *, what: str) -> None:
    """Raise ValueError if lists differ between ranks; `what` describes them in the error. Collective over the group."""
    numbered = {f"number {index}": line for index, line in enumerate(lines)}
    require_equal(numbered, group, what=what)


def optimizer_options(optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the class of an optimizer and the options of its groups, in a form to compare between ranks."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = {
        f"{name} of group {index}": value
        for index, group in enumerate(groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    return {"class": None if optimizer is None else name_of(optimizer), **options}


def replace_by_slices(optimizer: Optimizer, buckets: Sequence[Bucket], *, device: torch.device) -> None:
    """Replace the optimizer's parameters by this rank's masters of them, in the same group dicts.

    States that the optimizer's constructor made are replaced likewise. It also chooses fused kernels.

    Args:
        optimizer: not stepped yet.
        buckets: the buckets with the masters.
        device: the device on which the optimizer steps.
    """
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
    choose_fused_kernels(optimizer, device)


def choose_fused_kernels(combined: Optimizer, device: torch.device) -> None:
    """Select the fused kernel of a torch optimizer, where the device has one and the user selected no other.

    An explicit `fused`, `foreach`, `capturable` or `differentiable` is kept. On CUDA torch's default is `foreach`,
    which needs additional memory of the size of one state.
    """
    for optimizer in members_of(combined):
        operator, key = _fused_operator(optimizer), torch._C._dispatch_key_for_device(device.type)
        has_kernel = operator is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
        for group in optimizer.param_groups:
            if has_kernel and _can_fuse(group):
                group["fused"] = True
            if group.get("fused"):
                _move_step_counters(optimizer, group, device)


def _fused_operator(optimizer: Optimizer) -> str | None:
    """Return the kernel of an optimizer's class; of a subclass only if it has no update of its own."""
    return next(
        (
            name
            for kind, name in _FUSED.items()
            if isinstance(optimizer, kind) and type(optimizer).step is kind.step
        ),
        None,
    )


def _can_fuse(group: dict[str, Any]) -> bool:
    """Return True for a parameter group that a fused kernel can update, and whose user chose no implementation."""
    # The first two are None and the others False unless they were given.
    is_chosen = any(group.get(option) is not None for option in ("fused", "foreach"))
    is_chosen |= any(group.get(option) for option in ("capturable", "differentiable"))
    # Fused SGD fails where some parameters have momentum and others, new ones, have none yet.
    return not is_chosen and not group.get("momentum")


def _move_step_counters(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
    """Move step counters, of a constructor or of a run without fused kernels, to where a kernel reads them."""
    for piece in group["params"]:
        state = optimizer.state.get(piece, {})
        if "step" in state:
            state["step"] = state["step"].to(device, torch.float32)


def local_state(inner: Optimizer, scaler: DynamicScaler | None) -> dict[str, Any]:
    """Return the inner optimizer's state dict, and with it the loss scale.

    As in torch, the tensors are not copies: copy or save them before the next step.
    """
    return {**inner.state_dict(), "scaler": None if scaler is None else scaler.state_dict()}


def load_local_state(
    inner: Optimizer, scaler: DynamicScaler | None, state: dict[str, Any], *, device: torch.device
) -> None:
    """Load the result of `local_state` for steps on `device`."""
    inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    choose_fused_kernels(inner, device)  # the state may come from a run without fused kernels
    if scaler is not None and state["scaler"] is not None:  # otherwise it was saved under another precision
        scaler.load_state_dict(state["scaler"])


def local_masters(buckets: Sequence[Bucket], owned: OwnedParameters) -> dict[str, Any]:
    """Return this rank's shard of the weights as part of `ShardedOptimizer.local_state`.

    Returns:
        "masters": a list of tensors, not copies. "layout": lines that describe them; they can be loaded only under a
        layout with equal lines.
    """
    full = [slot.piece.detach() for slot in owned.slots if slot.piece is not None]
    return {
        "masters": [bucket.masters for bucket in buckets if not bucket.is_owned] + full,
        "layout": [line for bucket in buckets for line in bucket.describe()] + owned.describe(),
    }


def load_local_masters(current: dict[str, Any], state: dict[str, Any]) -> None:
    """Copy saved masters into this rank's masters. The parameters do not change.

    Args:
        current: the result of `local_masters`, whose tensors are changed.
        state: a saved result, from this layout.

    Raises:
        ValueError: it was saved under another layout or precision.
    """
    saved, layout = state.get("layout", ["a state dict of another optimizer"]), current["layout"]
    if saved != layout:
        entries = enumerate(zip_longest(saved, layout, fillvalue="nothing"))
        index, there, here = next((index, there, here) for index, (there, here) in entries if there != here)
        raise ValueError(
            f"the optimizer state was saved under another layout: entry {index} of its layout is {there}, not {here}. "
            "Use booster.save_optimizer and booster.load_optimizer, which convert between layouts"
        )
    for masters, values in zip(current["masters"], state["masters"], strict=True):
        masters.copy_(values)


def _by_identity(parameters: Sequence[ManagedParameter]) -> dict[int, ManagedParameter]:
    """Return the parameters by the `id` of their tensor; raise ValueError for two of one tensor or name."""
    by_identity: dict[int, ManagedParameter] = {}
    for managed in parameters:
        first = by_identity.setdefault(id(managed.parameter), managed)
        if first is not managed:
            raise ValueError(
                f"{first.name} and {managed.name} are one parameter: list a tied parameter under one name"
            )
    names = [managed.name for managed in parameters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two parameters are both named {', '.join(sorted(twice))}: names must be unique")
    return by_identity


def _is_fresh(state: dict[str, Any]) -> bool:
    """Return True if a state is as the constructor made it: usually empty, constants for Adagrad."""
    return not state or ("step" in state and float(state["step"]) == 0)


def _state_of_piece(optimizer: Optimizer, slot: Slot) -> dict[str, Any]:
    """Return the constant state that a constructor made for a parameter, in the shape of its master on this rank."""
    assert slot.piece is not None
    state = dict(optimizer.state[slot.parameter])
    for key, value in state.items():
        # A 0-d "step" counts the steps; another 0-d entry belongs to a 0-d parameter.
        if isinstance(value, Tensor) and (value.dim() or (not slot.weight.dim() and key != "step")):
            constant = value.flatten()[0]
            if not bool((value == constant).all()):
                raise AssertionError(
                    f"the state of a parameter before the first step is not one number: {value}"
                )
            state[key] = torch.full_like(slot.piece, constant.item(), requires_grad=False)
    return state
