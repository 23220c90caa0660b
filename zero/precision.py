"""The number format of a run, and the dynamic loss scale of fp16."""

from copy import deepcopy
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from ..cluster.device import computes_in_bf16, default_device
from ..cluster.errors import first_of, raise_errors
from ..cluster.options import AT_LEAST_ONE, Check, one_of, option, option_errors, type_errors
from ..cluster.transformers_api import ROUTER_FORMAT, creation_on_meta

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION = one_of(*DTYPES)
FINITE = Check(isfinite, "must be a finite number")
POSITIVE = Check(lambda value: 0 < value < inf, "must be a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """The dynamic loss scale of fp16, under ColossalAI's names.

    Args:
        initial_scale: the loss scale of fp16 in the first step.
        min_scale: the lower bound of the loss scale.
        growth_factor: the loss scale grows by it after `growth_interval` steps in a row without overflow.
        growth_interval: steps without overflow until the loss scale grows.
        backoff_factor: the loss scale shrinks by it on an overflow.
        hysteresis: overflows since the loss scale last grew that it takes to shrink it.
        max_scale: the upper bound of the loss scale.
    """

    initial_scale: float = option(2.0**16, FINITE)
    min_scale: float = option(1.0, POSITIVE)
    growth_factor: float = option(
        2.0, Check(lambda value: 1 < value < inf, "must be a finite number above 1")
    )
    growth_interval: int = option(1000, AT_LEAST_ONE)
    backoff_factor: float = option(0.5, Check(lambda value: 0 < value < 1, "must lie between 0 and 1"))
    hysteresis: int = option(2, AT_LEAST_ONE)
    max_scale: float = option(2.0**32, FINITE)

    def bound_errors(self) -> list[str]:
        """List the error of a first scale outside of the bounds."""
        low, initial, high = self.min_scale, self.initial_scale, self.max_scale
        if type_errors(self) or low <= initial <= high:
            return []
        return [f"initial_scale={initial} must be in min_scale={low} … max_scale={high}"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ScaleOptions):
    """Number format of the parameters. Gradients accumulate, and the optimizer updates, in float32.

    Args:
        precision: format of the parameters in forward and backward.

    Raises:
        ValueError: the configuration is invalid; lists all errors.
    """

    precision: Precision = option("fp32", PRECISION)

    def __post_init__(self) -> None:
        raise_errors([*option_errors(self), *self.bound_errors()])

    @property
    def dtype(self) -> torch.dtype:
        """The format of the parameters."""
        return DTYPES[self.precision]


def routers_of(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    """Return the mixtures' routers that cast their weights to another format than `dtype`: to `router.dtype`.

    Some model types have a `router_dtype` in the config, which their routers keep as an attribute `dtype`.
    """
    if not hasattr(getattr(model, "config", None), ROUTER_FORMAT):
        return []
    return [module for module in model.modules() if vars(module).get("dtype", dtype) is not dtype]


def router_formats(model: nn.Module, dtype: torch.dtype) -> dict[Parameter, torch.dtype]:
    """Return the weights of `routers_of`, with the format that they are cast to."""
    return {weight: router.dtype for router in routers_of(model, dtype) for weight in router.parameters()}


def cast_tables(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the tables that transformers builds in the format of the weights to `dtype`, in place.

    A table is a buffer of several dimensions that no file contains, as of sinusoidal positions. Layers add some to
    hidden states, where float32 would meet weights in 16 bits; others are float32 whatever the weights are. Which ones,
    a copy of the model on the meta device shows. A model in float32, or one that cannot be built from its config alone,
    keeps its tables.
    """
    pretrained: Any = next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel)), None
    )
    if pretrained is None or dtype is torch.float32:
        return
    tables = [
        (path, module, name)
        for path, module in pretrained.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers[name]) is not None
        and buffer.ndim > 1
        and buffer.is_floating_point()
        and buffer.dtype != dtype
    ]
    if not tables:
        return
    try:
        with torch.device("meta"), creation_on_meta():
            reference = type(pretrained)._from_config(deepcopy(pretrained.config), dtype=dtype)
    except Exception:  # code of any kind
        return
    buffers = dict(reference.named_buffers())
    for path, module, name in tables:
        buffer = buffers.get(f"{path}.{name}".lstrip("."))
        if buffer is not None and buffer.dtype == dtype:
            module._buffers[name] = module._buffers[name].to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def format_errors(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """List errors of parameters whose master weights would be rounded: in float64, or of routers not in float32.

    Args:
        model: the full model.
        dtype: the format of the run.
    """
    errors = [
        f"{ROUTER_FORMAT}={_name(router_dtype)!r} of the model's config rounds routers' weights, which train in "
        f"float32: set it to 'float32' or {_name(dtype)!r} before the model is built"
        for router_dtype in dict.fromkeys(router_formats(model, dtype).values())
        if router_dtype is not torch.float32
    ]
    in_float64 = [name for name, parameter in model.named_parameters() if parameter.dtype is torch.float64]
    if not in_float64:
        return errors
    return [
        *errors,
        f"{first_of(in_float64)} in torch.float64 would be rounded to float32, the format of gradients and master "
        "weights: call model.float(), or use TorchDDPPlugin or TorchFSDPPlugin, which compute in float64",
    ]


def default_precision(device: torch.device) -> Precision:
    """Return the safest precision for a device: fp32 on a CPU, bf16 on a GPU that supports it, else fp16."""
    if device.type == "cpu":
        return "fp32"
    return "bf16" if computes_in_bf16(device) else "fp16"


def precision_or_default(precision: str | None) -> str:
    """Return the given precision, or the device's default for None."""
    return default_precision(default_device()) if precision is None else precision


class DynamicScaler:
    """The loss scale of fp16: it shrinks when gradients overflow and grows after many steps without overflow.

    It is equal on all ranks if all call `update` with the same values.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._config = config
        self.scale = config.initial_scale
        self._steps_without_overflow = 0
        self._overflows_in_a_row = 0
        self._overflows_since_growth = 0

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step whose gradients did or did not overflow on any rank.

        Raises:
            RuntimeError: the gradients still overflow although the scale is at its minimum.
        """
        if overflow:
            self._steps_without_overflow = 0
            self._overflows_in_a_row += 1
            self._overflows_since_growth += 1
            if self._overflows_since_growth >= self._config.hysteresis:
                self._shrink()
            return
        self._overflows_in_a_row = 0
        self._steps_without_overflow += 1
        if self._steps_without_overflow == self._config.growth_interval:
            self._steps_without_overflow = 0
            self._overflows_since_growth = 0
            self.scale = min(self.scale * self._config.growth_factor, self._config.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters."""
        return {
            "scale": self.scale,
            "steps_without_overflow": self._steps_without_overflow,
            "overflows_in_a_row": self._overflows_in_a_row,
            "overflows_since_growth": self._overflows_since_growth,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.scale = state["scale"]
        self._steps_without_overflow = state["steps_without_overflow"]
        self._overflows_in_a_row = state["overflows_in_a_row"]
        self._overflows_since_growth = state["overflows_since_growth"]

    def _shrink(self) -> None:
        """Shrink the scale down to its minimum; raise RuntimeError for repeated overflows at the minimum."""
        # One overflow at the minimum is a bad batch, whose step is skipped. Several in a row are an error.
        at_minimum = self.scale <= self._config.min_scale
        if at_minimum and self._overflows_in_a_row >= self._config.hysteresis:
            raise beyond_fp16(self._overflows_in_a_row, f"has reached min_scale={self._config.min_scale:g}")
        self.scale = max(self.scale * self._config.backoff_factor, self._config.min_scale)


def beyond_fp16(num_overflows: int, scale_state: str) -> RuntimeError:
    """Return the error of overflows that no loss scale can prevent.

    Args:
        num_overflows: number of consecutive steps that overflowed.
        scale_state: the end of "although the loss scale …".
    """
    return RuntimeError(
        f"fp16 gradients are infinite or NaN for {num_overflows} steps in a row although the loss scale {scale_state}, "
        "so scaling cannot help. Either the loss itself is not finite (print it; lower the learning rate, look for a "
        "division or logarithm of zero), or the model exceeds the range of fp16: use precision='bf16'"
    )
