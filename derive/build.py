"""Small models with batches that their forwards accept. Imports nothing of Echelon."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .inputs import Inputs, loss_of, still
from .small import small_configs

LARGEST = 200_000_000  # parameters of a copy
ANSWERS = 16  # errors of one forward that are answered


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A small model and its batch.

    Args:
        make: returns the model; equal seeds give equal weights.
        model: one of them.
        batch: the arguments of its forward.
        inputs: makes such batches.
    """

    make: Callable[[int], nn.Module]
    model: nn.Module
    batch: dict[str, Any]
    inputs: Inputs

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        torch.default_generator.manual_seed(1)
        return loss_of(self.model(**self.batch))

    @cached_property
    def trained(self) -> tuple[nn.Module, Tensor]:
        """A model with its gradients, and the loss of the batch."""
        model = self.make(0)
        loss = replace(self, model=model).loss()
        loss.backward()
        return model, loss.detach()


def small_copy(
    kind: type[nn.Module], config: PreTrainedConfig, task: str, kept: Collection[str] = ()
) -> Copy:
    """Return a small copy of a model that trains on a synthetic batch.

    Args:
        kind: the class of the model.
        config: its config, of any size; it is not changed.
        task: see `Inputs`.
        kept: names of settings that keep their values.

    Raises:
        ValueError: there is none; with the errors of all attempts.
    """
    errors: list[str] = []
    for small in small_configs(config, kept):
        if isinstance(small, Exception):
            errors.append(described(small))
            continue
        try:
            small = _of_class(small, kind)
            if task == "TEXT_ENCODING":
                small.is_encoder_decoder = False
            _require_small(kind, small)

            def build(seed: int, small: PreTrainedConfig = small) -> nn.Module:
                torch.default_generator.manual_seed(seed)  # of the CPU alone
                return _with_values(still(kind(copy.deepcopy(small))))

            make = copying(build)
            model = make(0)
        except Exception as error:  # of any model class, in code that was written for other sizes
            errors.append(described(error))
            continue
        inputs = Inputs(model, task)
        for _ in range(ANSWERS):
            try:
                candidate = Copy(make=make, model=model, batch=inputs.make(), inputs=inputs)
                candidate.loss()
                return candidate
            except Exception as error:
                errors.append(described(error))
                if not inputs.adapt(error):  # the next attempt has other inputs
                    break
    raise ValueError(" | ".join(dict.fromkeys(errors)))


def copying(build: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a function that builds a model once for each seed and returns copies, which take a third of the time."""
    built = cache(build)
    return lambda seed: copy.deepcopy(built(seed))


def _with_values(model: nn.Module) -> nn.Module:
    """Give parameters that begin as zeros small values: behind zeros nothing could be compared."""
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_meta and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def described(error: Exception) -> str:
    """Return an error in one line, with the line of the model's code that raised it."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/models/" in file:
            place = f" ({file.rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else f'{text[:159]}…'}{place}"


def _of_class(config: PreTrainedConfig, kind: type[nn.Module]) -> PreTrainedConfig:
    """Return the config, or the one in it, that a model class takes."""
    config_class: Any = getattr(kind, "config_class", None)
    if config_class is None or isinstance(config, config_class):
        return config
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return next((inner_config for inner_config in inner if isinstance(inner_config, config_class)), config)


def _require_small(kind: type[nn.Module], config: PreTrainedConfig) -> None:
    """Raise ValueError if a model of this config has more than LARGEST parameters."""
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in kind(config).parameters())
    except (NotImplementedError, RuntimeError):  # a constructor that reads values
        return
    if count > LARGEST:
        raise ValueError(
            f"the smallest config has {count:,} parameters: only settings with names as in transformers (hidden_size, "
            "num_hidden_layers, vocab_size) are made small"
        )
