"""Checks of calls that save and load, before anything is done: of their arguments, and that ranks make the same one."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..cluster.errors import raise_errors
from ..data.loader import SharedLoader
from .consent import on_all_ranks
from .local import LocalModel, saved_state
from .model import config_errors
from .optimizer import Trained, saved_options
from .tensor_file import dtype_errors, value_errors

_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def require_same_call(
    name: str, arguments: Mapping[str, Any], errors: Sequence[str], group: dist.ProcessGroup
) -> None:
    """Check a call, and go on where all ranks make the same one. One all-gather of objects over the group.

    Args:
        name: of the call.
        arguments: by name, checked by CHECKS.
        errors: further ones, of this call alone.
        group: all ranks, over the CPU.

    Raises:
        ValueError: it cannot be done on some rank, or ranks make different calls; all of it, on every rank.
    """

    def described() -> str:
        found = [*errors]
        for key, value in arguments.items():
            found += CHECKS[key](key, value) if key in CHECKS else []
        raise_errors(found)
        return f"{name}({', '.join(f'{key}={_shown(key, value)!r}' for key, value in arguments.items())})"

    calls: dict[str, list[int]] = {}
    for rank, call in enumerate(on_all_ranks(described, group)):
        calls.setdefault(call, []).append(rank)
    if len(calls) > 1:
        each = "; ".join(
            f"{call} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
            for call, ranks in calls.items()
        )
        raise ValueError(f"every rank has to make the same call, and they make different ones: {each}")


def _shown(key: str, value: Any) -> Any:
    """A checked value as ranks have to agree on it: a path wherever they are, a part of a run by its class."""
    if CHECKS.get(key) is _path_errors:
        return os.path.abspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, LocalModel):
        value = value.module
    return type(value.inner if isinstance(value, Trained) else value).__name__


def _path_errors(name: str, value: Any) -> list[str]:
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value):
        return []
    return [f"{name}={value!r} must be a path, a text that is not empty or a pathlib.Path: give one"]


def _size_errors(name: str, value: Any) -> list[str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [] if is_number and value > 0 else [f"{name}={value!r} must be a number of MiB, above 0"]


def _prefix_errors(name: str, value: Any) -> list[str]:
    if value is None or (isinstance(value, str) and _PREFIX.fullmatch(value)):
        return []
    return [f"{name}={value!r} must be letters, digits, _, - and points: it begins the names of files"]


def _gather_errors(name: str, value: Any) -> list[str]:
    if value is True:
        return []
    return [f"{name}={value!r}: files hold whole tensors, which no rank gathers to write; leave it out"]


def _step_errors(name: str, value: Any) -> list[str]:
    return [] if _is_count(value, least=0) else [f"{name}={value!r} must be a whole number, at least 0"]


def _keep_errors(name: str, value: Any) -> list[str]:
    if value is None or _is_count(value, least=1):
        return []
    return [f"{name}={value!r} must be a whole number, at least 1, or None to keep all"]


def _resume_errors(name: str, value: Any) -> list[str]:
    if value in (None, "auto", "must") or _is_count(value, least=0):
        return []
    return [f'{name}={value!r} must be "auto", "must", the number of a step, or None']


def lr_scheduler_errors(name: str, value: Any) -> list[str]:
    """Errors of a scheduler that cannot be saved or loaded."""
    errors = _part_errors(name, value, "give the scheduler that booster.boost returned")
    return errors or value_errors(value.state_dict(), f"the state of the {type(value).__name__}")


def _dataloader_errors(name: str, value: Any) -> list[str]:
    if isinstance(value, SharedLoader):  # of others it may begin a pass to ask for their position
        try:
            return value_errors(value.state_dict(), "the position in the data")
        except ValueError as error:
            return [str(error)]
    return _part_errors(
        name,
        value,
        "it does not know its position: give one of booster.plugin.prepare_dataloader, or leave it out and keep the "
        "position in `user`",
    )


def _part_errors(name: str, part: Any, instead: str) -> list[str]:
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return []
    shown = repr(part) if part is None or isinstance(part, str | int | float) else f"a {type(part).__name__}"
    return [f"{name} is {shown}, which has no state_dict and load_state_dict: {instead}"]


def _is_count(number: Any, *, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _unless_none(check: Callable[[str, Any], list[str]]) -> Callable[[str, Any], list[str]]:
    return lambda name, value: [] if value is None else check(name, value)


# Errors of an argument, from its name and its value.
CHECKS: dict[str, Callable[[str, Any], list[str]]] = {
    "checkpoint": _path_errors,
    "directory": _path_errors,
    "step": _step_errors,
    "keep_last": _keep_errors,
    "size_per_shard": _size_errors,
    "prefix": _prefix_errors,
    "gather_dtensor": _gather_errors,
    "resume": _resume_errors,
    "lr_scheduler": _unless_none(lr_scheduler_errors),
    "dataloader": _unless_none(_dataloader_errors),
}


def save_faults(model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any) -> list[str]:
    """Reasons why no checkpoint of these could be written, as far as they are known now.

    Args:
        model: whole, or this rank's part of it.
        optimizer: its parameter groups are tried, and not its states, which come with its steps.
        lr_scheduler: tried where it is one of torch's.
    """
    is_known = isinstance(lr_scheduler, LRScheduler)
    return [
        *config_errors(model),
        *_state_errors(model),
        *_option_errors([] if optimizer is None else optimizer.param_groups),
        *(lr_scheduler_errors("lr_scheduler", lr_scheduler) if is_known else []),
    ]


def _state_errors(model: nn.Module) -> list[str]:
    try:
        state = saved_state(model)
    except ValueError as error:
        return [str(error)]
    return dtype_errors({name: tensor.dtype for name, tensor in state.items()})


def _option_errors(groups: list[dict[str, Any]]) -> list[str]:
    try:
        options = [each for group in groups for each in saved_options(group).items()]
    except Exception as error:  # of a class of the user's, which cannot be copied
        return [f"an option of a parameter group cannot be saved: {type(error).__name__}: {error}"]
    if not value_errors(options, "the options"):
        return []
    found = [
        error
        for name, value in options
        for error in value_errors(value, f"the option {name!r} of a parameter group")
    ]
    return list(dict.fromkeys(found))
