"""The stage plan of a user's model, derived from a small copy of its config. No communication."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig

from ..cluster.forward_random import generators_put_back
from ..cluster.transformers_api import ROUTER_LOGITS
from ..pipeline.stage_plan import StagePlan
from .build import Copy, small_copy
from .double import in_double
from .stages import derived_plan
from .tasks import task_of


def stage_plan_of(model: nn.Module, copy: Copy | None = None) -> StagePlan:
    """Return the stage plan of a transformers model; see [Note: derived stages].

    Equal models give equal plans on every rank: the copy has fixed seeds. The random state, the default device and
    dtype of the script stay as they are, and the model is only looked at.

    Args:
        model: the full model, not yet cut; may be on the meta device.
        copy: its small copy by `copy_of`, in float64; None makes it.

    Raises:
        ValueError: it has no config, no small copy trains, or the stages depart from the whole copy.
    """
    with isolated():
        return derived_plan(copy or in_double(copy_of(model)), model)


def copy_of(model: nn.Module) -> Copy:
    """Return a small copy of a user's model, without the auxiliary loss of experts, which is formed over all stages.

    Raises:
        ValueError: it has no config, or no small copy trains.
    """
    kind, config = type(model), getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(
            f"a {kind.__name__} has no config of transformers, from which a small copy could be built"
        )
    config = deepcopy(config)
    for section in (config, config.get_text_config()):
        if getattr(section, ROUTER_LOGITS, False):
            setattr(section, ROUTER_LOGITS, False)
    try:
        return small_copy(kind, config, task_of(kind))
    except ValueError as error:
        raise ValueError(f"no small copy of its config trains ({error})") from error


@contextmanager
def isolated() -> Iterator[None]:
    """Compute on the CPU in float32 with gradients, in whatever context the script boosts; leave nothing behind.

    Random numbers, and warnings that transformers gives once for a process, stay for the script's own model.
    """
    cpu, dtype, verbosity = (
        torch.device("cpu"),
        torch.get_default_dtype(),
        transformers.logging.get_verbosity(),
    )
    with (
        _disable_current_modes(),  # such as fake tensors, or a counter of operations
        generators_put_back(cpu),
        cpu,
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(cpu.type, enabled=False),
        warnings.catch_warnings(),
        patch.object(logging.Logger, "warning_once", lambda *_, **__: None),
    ):
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            transformers.logging.set_verbosity(verbosity)
