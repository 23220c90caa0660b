"""Check save and load calls before they run: the arguments, and that all ranks make the same call."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..cluster.errors import raise_errors
from ..cluster.gathering import on_all_ranks, raise_different
from ..cluster.options import is_number
from ..data.loader import ShardedLoader
from .local_tensors import LocalModel, saved_state
from .model import config_errors
from .optimizer_state import Trained, saved_options
from .tensor_file import dtype_errors, value_errors

_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def require_same_call(name: str, arguments: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Check the arguments of a call and require the same call on all ranks. One all-gather of objects over the group.

    Args:
        name: name of the call.
        arguments: the arguments by name.
        group: all ranks, on the CPU backend.

    Raises:
        ValueError: arguments are invalid on some rank, or ranks make different calls; lists all errors, on every rank.
    """

    def checked() -> dict[str, str]:
        raise_errors([error for key, value in arguments.items() for error in _errors(key, value)])
        return {"the call": name} | {key: repr(_shown(key, value)) for key, value in arguments.items()}

    calls = on_all_ranks(checked, group)
    if len({call["the call"] for call in calls}) > 1:  # other arguments then say nothing
        calls = [{"the call": call["the call"]} for call in calls]
    if any(call != calls[0] for call in calls):
        rule = "every rank has to make the same call"
        raise_different(calls, range(len(calls)), what="saving or loading", rule=rule)


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value != "")


def _is_count(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# By argument: a predicate of valid values, and the rule as text for the error.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("checkpoint", "directory"),
        (_is_path, "must be a path: give a str that is not empty, or a pathlib.Path"),
    ),
    "step": (lambda value: _is_count(value, least=0), "must be an integer of at least 0"),
    "keep_last": (
        lambda value: value is None or _is_count(value, least=1),
        "must be an integer of at least 1, or None to keep all",
    ),
    "size_per_shard": (
        lambda value: is_number(value) and value > 0,
        "must be a number of MiB, above 0",
    ),
    "prefix": (
        lambda value: value is None or bool(isinstance(value, str) and _PREFIX.fullmatch(value)),
        "must be letters, digits, _, - and points: it begins the names of files",
    ),
    "gather_dtensor": (
        lambda value: value is True,
        "is not available: leave it out",
    ),
    "resume": (
        lambda value: value in (None, "auto", "must") or _is_count(value, least=0),
        'must be "auto", "must", the number of a step, or None',
    ),
}


def _errors(name: str, value: Any) -> list[str]:
    """Return the errors of an argument's value; empty if there are none."""
    if name in _RULES:
        is_right, words = _RULES[name]
        return [] if is_right(value) else [f"{name}={value!r} {words}"]
    if name == "lr_scheduler" and value is not None:
        return lr_scheduler_errors(value)
    return _dataloader_errors(value) if name == "dataloader" and value is not None else []


def _shown(name: str, value: Any) -> Any:
    """Return the form of a value that ranks compare: the absolute path, a plain value, or the class of an object."""
    if name in ("checkpoint", "directory"):
        return os.path.abspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, LocalModel):
        value = value.module
    elif isinstance(value, Trained):
        value = value.inner
    return type(value).__name__


def lr_scheduler_errors(value: Any) -> list[str]:
    """Return the errors of a scheduler that cannot be saved or loaded."""
    errors = _state_dict_errors("lr_scheduler", value, "give the scheduler that booster.boost returned")
    return errors or value_errors(value.state_dict(), f"the state of the {type(value).__name__}")


def _dataloader_errors(value: Any) -> list[str]:
    """Return the errors of a dataloader without a position that can be saved; empty if there are none."""
    if isinstance(value, ShardedLoader):  # not others: their `state_dict` may start an epoch
        try:
            return value_errors(value.state_dict(), "the position in the data")
        except ValueError as error:
            return [str(error)]
    if isinstance(value, list | tuple):
        return [
            f"dataloader is a {type(value).__name__}: give the one whose position the run has, that of training"
        ]
    return _state_dict_errors(
        "dataloader",
        value,
        "it does not know its position: give one of booster.plugin.prepare_dataloader, or leave it out and keep the "
        "position in `user`",
    )


def _state_dict_errors(name: str, value: Any, instead: str) -> list[str]:
    """Return the error of an argument of a save or load that has no `state_dict` and `load_state_dict`."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return []
    shown = (
        repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
    )
    return [f"{name} is {shown}, which has no state_dict and load_state_dict: {instead}"]


def save_errors(model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any) -> list[str]:
    """Return the errors that a checkpoint of these objects would raise, as far as they are known before training.

    Args:
        model: the full model, or this rank's part of it.
        optimizer: its parameter groups are checked; its states do not exist yet.
        lr_scheduler: checked if it is one of torch's.
    """
    errors = config_errors(model)
    try:
        errors += dtype_errors({name: tensor.dtype for name, tensor in saved_state(model).items()})
    except ValueError as error:
        errors.append(str(error))
    errors += _option_errors([] if optimizer is None else optimizer.param_groups)
    return errors + (lr_scheduler_errors(lr_scheduler) if isinstance(lr_scheduler, LRScheduler) else [])


def _option_errors(groups: list[dict[str, Any]]) -> list[str]:
    """Return the errors of options of parameter groups that cannot be saved; empty if there are none."""
    try:
        options = [option for group in groups for option in saved_options(group).items()]
    except Exception as error:  # an object of the user's that cannot be copied
        return [f"an option of a parameter group cannot be saved: {type(error).__name__}: {error}"]
    if not value_errors(options, "the options"):
        return []
    errors = [
        error
        for name, value in options
        for error in value_errors(value, f"the option {name!r} of a parameter group")
    ]
    return list(dict.fromkeys(errors))
