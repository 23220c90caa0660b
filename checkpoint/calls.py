"""Checks of calls that save and load, before anything is done: of their arguments, and that ranks make the same one."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..cluster.dataloader import SharedLoader
from .consent import on_all_ranks
from .local import saved_state
from .model import config_errors
from .optimizer import saved_options
from .tensor_file import dtype_errors, value_errors

_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def agree(name: str, given: Mapping[str, Any], faults: Sequence[str], group: dist.ProcessGroup) -> None:
    """Go on where all ranks make the same call, and it can be done. One all-gather of objects over the group.

    Args:
        name: of the call.
        given: what it was given, as far as ranks have to agree on it.
        faults: why it cannot be done.
        group: all ranks, over the CPU.

    Raises:
        ValueError: it cannot be done on some rank, or ranks make different calls; all of it, on every rank.
    """

    def told() -> str:
        if faults:
            raise ValueError("; ".join(faults))
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    calls: dict[str, list[int]] = {}
    for rank, call in enumerate(on_all_ranks(told, group)):
        calls.setdefault(call, []).append(rank)
    if len(calls) > 1:
        each = "; ".join(
            f"{call} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
            for call, ranks in calls.items()
        )
        raise ValueError(f"every rank has to make the same call, and they make different ones: {each}")


def shown_path(path: Any) -> str | None:
    """A path by which two ranks mean the same; None for what is none."""
    return None if path_faults("", path) else os.path.abspath(path)


def kind_of(part: Any) -> str | None:
    """What two ranks have to agree on of a part of a run: that it is given, and its class."""
    return None if part is None else type(part).__name__


def path_faults(name: str, path: Any) -> list[str]:
    """Why an argument is no path."""
    if isinstance(path, str | os.PathLike) and os.fspath(path):
        return []
    return [f"{name}={path!r} must be a path, a text that is not empty or a pathlib.Path: give one"]


def size_faults(size_per_shard: Any) -> list[str]:
    """Why files cannot be of such a size."""
    is_number = isinstance(size_per_shard, int | float) and not isinstance(size_per_shard, bool)
    if is_number and size_per_shard > 0:
        return []
    return [f"size_per_shard={size_per_shard!r} must be a number of MiB, above 0"]


def prefix_faults(prefix: Any, *, shard: bool) -> list[str]:
    """Why files cannot be named so."""
    if prefix is None:
        return []
    if not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None:
        return [f"prefix={prefix!r} must be letters, digits, _, - and points: it begins the names of files"]
    if not shard:
        return [f"prefix={prefix!r} is for the files of a folder: give shard=True, or name the file so"]
    return []


def gather_faults(gather_dtensor: Any) -> list[str]:
    """Why tensors cannot be saved in pieces."""
    if gather_dtensor is True:
        return []
    return [
        f"gather_dtensor={gather_dtensor!r}: files hold whole tensors, which no rank gathers to write; leave it out"
    ]


def lr_scheduler_faults(lr_scheduler: Any) -> list[str]:
    """Why something cannot be saved or loaded as a scheduler."""
    faults = _part_faults("lr_scheduler", lr_scheduler, "give the scheduler that booster.boost returned")
    return faults or value_errors(
        lr_scheduler.state_dict(), f"the state of the {type(lr_scheduler).__name__}"
    )


def dataloader_faults(dataloader: Any) -> list[str]:
    """Why something cannot be saved or loaded as what the data come from."""
    if isinstance(dataloader, SharedLoader):  # of others it may begin a pass to ask for their position
        try:
            return value_errors(dataloader.state_dict(), "the position in the data")
        except ValueError as error:
            return [str(error)]
    return _part_faults(
        "dataloader",
        dataloader,
        "it does not know its position: give one of booster.plugin.prepare_dataloader, or leave it out and keep the "
        "position in `user`",
    )


def step_faults(step: Any, keep_last: Any) -> list[str]:
    """Why no step of such a number can be saved, or not so many kept."""
    faults = []
    if not _is_count(step, least=0):
        faults.append(f"step={step!r} must be a whole number, at least 0")
    if keep_last is not None and not _is_count(keep_last, least=1):
        faults.append(f"keep_last={keep_last!r} must be a whole number, at least 1, or None to keep all")
    return faults


def resume_faults(resume: Any) -> list[str]:
    """Why nothing can be gone on from so."""
    if resume in (None, "auto", "must") or _is_count(resume, least=0):
        return []
    return [f'resume={resume!r} must be "auto", "must", the number of a step, or None']


def _part_faults(name: str, part: Any, instead: str) -> list[str]:
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return []
    shown = repr(part) if part is None or isinstance(part, str | int | float) else f"a {type(part).__name__}"
    return [f"{name} is {shown}, which has no state_dict and load_state_dict: {instead}"]


def _is_count(number: Any, *, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def save_faults(model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any) -> list[str]:
    """Reasons why no checkpoint of these could be written, as far as they are known now.

    Args:
        model: whole, or what this rank has of it.
        optimizer: its parameter groups are tried, and not its states, which come with its steps.
        lr_scheduler: tried where it is one of torch's.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        *config_errors(model),
        *_state_faults(model),
        *_option_faults(groups),
        *(lr_scheduler_faults(lr_scheduler) if isinstance(lr_scheduler, LRScheduler) else []),
    ]


def _state_faults(model: nn.Module) -> list[str]:
    try:
        state = saved_state(model)
    except ValueError as error:
        return [str(error)]
    return dtype_errors({name: tensor.dtype for name, tensor in state.items()})


def _option_faults(groups: list[dict[str, Any]]) -> list[str]:
    try:
        saved = [saved_options(group) for group in groups]
    except Exception as error:  # of a class of the user's, which cannot be copied
        return [f"an option of a parameter group cannot be saved: {type(error).__name__}: {error}"]
    if not value_errors(saved, "the options"):
        return []
    options = [each for group in saved for each in group.items()]
    found = [
        fault
        for name, value in options
        for fault in value_errors(value, f"the option {name!r} of a parameter group")
    ]
    return list(dict.fromkeys(found))
