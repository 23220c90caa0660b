"""Errors of a save that are known before training. Saving is checkpoints.py."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .calls import lr_scheduler_faults
from .model_files import config_faults
from .names import saved_state
from .tensor_file import dtype_faults
from .trained import saved_options
from .values import value_faults


def save_faults(model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any) -> list[str]:
    """Reasons why no checkpoint of these could be written, as far as they are known now.

    Args:
        model: whole, or what this rank has of it.
        optimizer: its parameter groups are tried, and not its states, which come with its steps.
        lr_scheduler: tried where it is one of torch's.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        *config_faults(model),
        *_state_faults(model),
        *_option_faults(groups),
        *(lr_scheduler_faults(lr_scheduler) if isinstance(lr_scheduler, LRScheduler) else []),
    ]


def _state_faults(model: nn.Module) -> list[str]:
    try:
        state = saved_state(model)
    except ValueError as error:
        return [str(error)]
    return dtype_faults({name: tensor.dtype for name, tensor in state.items()})


def _option_faults(groups: list[dict[str, Any]]) -> list[str]:
    try:
        saved = [saved_options(group) for group in groups]
    except Exception as error:  # of a class of the user's, which cannot be copied
        return [f"an option of a parameter group cannot be saved: {type(error).__name__}: {error}"]
    if not value_faults(saved, "the options"):
        return []
    options = [each for group in saved for each in group.items()]
    found = [
        fault
        for name, value in options
        for fault in value_faults(value, f"the option {name!r} of a parameter group")
    ]
    return list(dict.fromkeys(found))
