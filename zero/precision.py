"""The number format of a run, and the dynamic loss scale of fp16."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn

from ..cluster.device import computes_in_bf16
from ..cluster.errors import raise_errors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number format of the parameters. Gradients accumulate, and the optimizer updates, in float32.

    The other settings are those of fp16's dynamic loss scale, under ColossalAI's names.

    Args:
        precision: format of the parameters in forward and backward.
        initial_scale: the loss scale of the first step.
        min_scale, max_scale: bounds of the scale.
        growth_factor: the scale grows by it after `growth_interval` steps in a row without overflow.
        growth_interval: steps without overflow until the scale grows.
        backoff_factor: the scale shrinks by it on an overflow.
        hysteresis: the number of overflows since the scale last grew that it takes to shrink it.

    Raises:
        ValueError: the configuration is invalid; lists all errors.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    growth_interval: int = 1000
    backoff_factor: float = 0.5
    hysteresis: int = 2
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        raise_errors(precision_errors(**asdict(self)))

    @property
    def dtype(self) -> torch.dtype:
        """The format of the parameters."""
        return DTYPES[self.precision]


# By setting: the test of a valid number, and the rule in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_scale": (lambda value: value > 0, "it must be above 0"),
    "growth_factor": (lambda value: value > 1, "it must be above 1"),
    "growth_interval": (
        lambda value: value >= 1 and value % 1 == 0,
        "it must be an integer of at least 1 (steps)",
    ),
    "backoff_factor": (lambda value: 0 < value < 1, "it must lie between 0 and 1"),
    "hysteresis": (
        lambda value: value >= 1 and value % 1 == 0,
        "it must be an integer of at least 1 (overflows)",
    ),
}


def precision_errors(*, precision: str = "fp32", **numbers: Any) -> list[str]:
    """Return the errors of arguments of `PrecisionConfig`, each with the allowed values; empty when they are valid."""
    errors = []
    if not isinstance(precision, str) or precision not in DTYPES:
        errors.append(f"precision={precision!r}: use one of {', '.join(map(repr, DTYPES))}")
    if strange := [
        f"{name}={value!r}: it must be a finite number"
        for name, value in numbers.items()
        if not is_finite_number(value)
    ]:
        return errors + strange
    errors += [
        f"{name}={numbers[name]}: {rule}"
        for name, (is_sound, rule) in _RULES.items()
        if name in numbers and not is_sound(numbers[name])
    ]
    low, initial, high = (
        numbers.get(name, getattr(PrecisionConfig, name))
        for name in ("min_scale", "initial_scale", "max_scale")
    )
    if not low <= initial <= high:
        errors.append(f"initial_scale={initial}: it must be in min_scale={low} … max_scale={high}")
    return errors


def format_errors(model: nn.Module) -> list[str]:
    """List the error of parameters in float64, which float32 buckets would round; empty if there are none."""
    wide = [name for name, each in model.named_parameters() if each.dtype is torch.float64]
    if not wide:
        return []
    others = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
    return [
        f"{wide[0]}{others} in torch.float64 would be rounded to float32, the format of gradients and master weights: "
        "call model.float(), or use TorchDDPPlugin or TorchFSDPPlugin, which compute in float64"
    ]


def is_finite_number(value: object) -> bool:
    """Return True for a finite integer or float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def default_precision(device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    """Return the safest precision for a device: fp32 on a CPU, bf16 on a GPU that supports it, else fp16."""
    if device.type == "cpu":
        return "fp32"
    return "bf16" if computes_in_bf16(device) else "fp16"


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
        # One overflow at the minimum is a bad batch, whose step is skipped. Several in a row are an error.
        at_minimum = self.scale <= self._config.min_scale
        if at_minimum and self._overflows_in_a_row >= self._config.hysteresis:
            raise beyond_fp16(self._overflows_in_a_row, f"has reached min_scale={self._config.min_scale:g}")
        self.scale = max(self.scale * self._config.backoff_factor, self._config.min_scale)


def beyond_fp16(in_a_row: int, where: str) -> RuntimeError:
    """Make the error of overflows that no loss scale can prevent.

    Args:
        in_a_row: number of consecutive steps that overflowed.
        where: the state of the scale, in words.
    """
    return RuntimeError(
        f"fp16 gradients are infinite or NaN for {in_a_row} steps in a row although the loss scale {where}, so scaling "
        "cannot help. Either the loss itself is not finite (print it; lower the learning rate, look for a division or "
        "logarithm of zero), or the model exceeds the range of fp16: use precision='bf16'"
    )
