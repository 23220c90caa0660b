"""The user's optimizer around which a sharded one is built: its groups, states, and what a rank saves of it."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..cluster.agree import require_equal
from .bucket import Bucket, Slot
from .partition import ManagedParameter
from .precision import DynamicScaler
from .reducer import sums_in_order

EQUAL_OPTIONS = (  # on all ranks: the rule in an error
    "must be equal at every step (call scheduler.step on all ranks alike, with a loss that is equal on all, as that of "
    "execute_pipeline is)"
)
NOT_PICKLED = (
    "a boosted optimizer cannot be copied or pickled, since its parameters and process groups cannot: call "
    "booster.save_optimizer(optimizer, folder) on every rank, or copy the optimizer before boost"
)
PARTIAL_STATE = (
    "this rank has only a part of this optimizer's state, which state_dict() would give for the whole: call "
    "booster.save_optimizer(optimizer, folder) or booster.save_checkpoint on every rank"
)

# torch.optim's that have a fused kernel, on some kinds of devices; a subclass may do something of its own.
_FUSED = {
    torch.optim.Adagrad: "aten::_fused_adagrad_",
    torch.optim.Adam: "aten::_fused_adam_",
    torch.optim.AdamW: "aten::_fused_adamw_",
    torch.optim.SGD: "aten::_fused_sgd_",
}


class StepGuard:
    """The right to step an optimizer that was boosted: outside of this context, stepping it raises RuntimeError."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._is_entered = False
        optimizer.register_step_pre_hook(self._require_entered)

    def __enter__(self) -> None:
        self._is_entered = True

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def _require_entered(self, *_: Any) -> None:
        if not self._is_entered:
            raise RuntimeError(
                "this optimizer was boosted: step the one that boost returned, which reduces gradients and knows the "
                "loss scale"
            )


class OptimizerWrapper(Optimizer):
    """Has the groups, states, defaults and hooks of an inner optimizer, which nobody else may step from now on.

    Args:
        optimizer: the inner one.
    """

    # The base class is not initialized: it would make groups.
    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self._guard = StepGuard(optimizer)
        # Hooks registered on this optimizer run with the inner one's.
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
        """Refuse: the flat memory is laid out once."""
        raise RuntimeError("add parameter groups to the optimizer before boost: its memory is laid out there")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_PICKLED)


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
        own = [by_identity[id(each)] for each in group["params"] if id(each) in by_identity]
        groups.append([managed for managed in own if managed.parameter.requires_grad])
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


def require_one_layout(groups: Sequence[Sequence[ManagedParameter]], *, group: dist.ProcessGroup) -> None:
    """Compare the parameters of the ranks of the data axis, and of each sum group.

    Args:
        groups: the trained parameters by parameter group.
        group: the data axis.

    Raises:
        ValueError: they differ; on every rank.
    """
    lines = [
        f"{managed.name} {tuple(managed.parameter.shape)} of group {index}, primary={managed.is_primary}"
        for index, members in enumerate(groups)
        for managed in members
    ]
    _require_equal_lines(lines, group, what="the trainable parameters of the optimizer")
    flat = [managed for members in groups for managed in members]
    for _, summing, indices in sums_in_order(flat):
        shapes = [str(tuple(flat[index].parameter.shape)) for index in indices]
        _require_equal_lines(shapes, summing, what="the shapes of parameters whose gradients are summed")


def _require_equal_lines(lines: list[str], group: dist.ProcessGroup, *, what: str) -> None:
    numbered = {f"number {index}": line for index, line in enumerate(lines)}
    require_equal(numbered, group, what=what)


def optimizer_options(optimizer: Optimizer | None) -> dict[str, Any]:
    """The class of an optimizer, and the options of its groups but for the parameters, by name."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = {
        f"{name} of group {index}": value
        for index, group in enumerate(groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    return {"class": None if optimizer is None else type(optimizer).__qualname__, **options}


def hold_pieces(optimizer: Optimizer, buckets: Sequence[Bucket], *, device: torch.device) -> None:
    """Give the optimizer this rank's pieces in the place of the parameters, in the same group dicts.

    Args:
        optimizer: not stepped yet.
        buckets: where the pieces are.
        device: where they are stepped.
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


def choose_fused_kernels(optimizer: Optimizer, device: torch.device) -> None:
    """Let an optimizer of torch step by its fused kernel, where the device has one and the user chose nothing.

    Whoever gave `fused`, `foreach`, `capturable` or `differentiable` keeps what they chose. By itself torch steps by
    lists of tensors on CUDA, which takes memory of the size of a state.
    """
    operator, key = _FUSED.get(type(optimizer)), torch._C._dispatch_key_for_device(device.type)
    has_kernel = operator is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    for group in optimizer.param_groups:
        # The first two are None and the others False unless they were given.
        is_chosen = any(group.get(option) is not None for option in ("fused", "foreach"))
        is_chosen |= any(group.get(option) for option in ("capturable", "differentiable"))
        # Fused SGD fails where some parameters have momentum and others, new ones, have none yet.
        if has_kernel and not is_chosen and not group.get("momentum"):
            group["fused"] = True
        for piece in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(piece, {})
            if "step" in state:  # of a constructor, or a run without such kernels
                state["step"] = state["step"].to(device, torch.float32)


def local_state(inner: Optimizer, buckets: Sequence[Bucket], scaler: DynamicScaler | None) -> dict[str, Any]:
    """torch's own state dict of the inner optimizer, and beside it masters, loss scale and layout.

    As in torch, tensors are the live ones: copy or save them before the next step.
    """
    return {
        **inner.state_dict(),
        "masters": [bucket.masters for bucket in buckets],
        "scaler": None if scaler is None else scaler.state_dict(),
        "layout": layout_lines(buckets),
    }


def load_local_state(
    inner: Optimizer,
    buckets: Sequence[Bucket],
    scaler: DynamicScaler | None,
    state: dict[str, Any],
    *,
    device: torch.device,
) -> None:
    """Load what `local_state` returned, to be stepped on a device. The parameters are as they were.

    Raises:
        ValueError: it was saved under another layout or precision.
    """
    saved, own = state.get("layout", ["a state dict of another optimizer"]), layout_lines(buckets)
    if saved != own:
        shorter, longer = sorted((saved, own), key=len)
        at = next((i for i, line in enumerate(shorter) if line != longer[i]), len(shorter))
        there, here = (lines[at] if at < len(lines) else "nothing" for lines in (saved, own))
        raise ValueError(
            f"the optimizer state was saved under another layout: number {at} is {there} there and {here} "
            "here. Load what booster.save_optimizer wrote under any layout by booster.load_optimizer"
        )
    inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    choose_fused_kernels(inner, device)  # the state may come from a run without
    for bucket, masters in zip(buckets, state["masters"], strict=True):
        bucket.masters.copy_(masters)
    if scaler is not None and state["scaler"] is not None:  # else it was saved under another precision
        scaler.load_state_dict(state["scaler"])


def layout_lines(buckets: Sequence[Bucket]) -> list[str]:
    """One line per parameter; equal lines mean that a state fits."""
    return [line for bucket in buckets for line in bucket.describe()]


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
    """Return True if a state is as the constructor leaves it: most leave none, Adagrad leaves constants."""
    return not state or ("step" in state and float(state["step"]) == 0)


def _state_of_piece(optimizer: Optimizer, slot: Slot) -> dict[str, Any]:
    """The state that a constructor left for a parameter, constants, in the shape of its piece."""
    assert slot.piece is not None
    state = dict(optimizer.state[slot.parameter])
    for key, value in state.items():
        # A number of its own is the count of steps; another one belongs to a parameter that is a number.
        if isinstance(value, Tensor) and (value.dim() or (not slot.weight.dim() and key != "step")):
            constant = value.flatten()[0]
            if not bool((value == constant).all()):
                raise AssertionError(
                    f"the state of a parameter before the first step is not one number: {value}"
                )
            state[key] = torch.full_like(slot.piece, constant.item(), requires_grad=False)
    return state
