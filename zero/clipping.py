"""Clipping of gradients: its coefficient, and checks of its arguments and of the norm."""

from math import isfinite

from ..cluster.errors import raise_errors
from ..cluster.options import is_number


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of `norm` to `max_norm`, as torch's `clip_grad_norm_`; 0 never clips."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def require_clip_norm(max_norm: float, norm_type: float) -> None:
    """Raise ValueError if gradients cannot be clipped to this norm; see `ShardedOptimizer.clip_grad_by_norm`."""
    checks = (
        (_is_positive(max_norm), f"max_norm={max_norm!r}: it must be above 0; inf only measures the norm"),
        (
            _is_positive(norm_type),
            f"norm_type={norm_type!r}: it must be above 0, or inf for the largest magnitude",
        ),
    )
    raise_errors([error for is_valid, error in checks if not is_valid])


def require_clip_value(clip_value: float) -> None:
    """Raise ValueError if gradients cannot be clipped to this value."""
    if not _is_positive(clip_value):
        raise ValueError(
            f"clip_value={clip_value!r}: it must be above 0; entries are clipped to -clip_value … clip_value"
        )


def require_finite_norm(norm: float, norm_type: float) -> None:
    """Raise RuntimeError if a norm is infinite or NaN."""
    if not isfinite(norm):
        raise RuntimeError(
            f"the gradient norm (norm_type={norm_type}) is {norm}, and error_if_nonfinite=True: leave it out to skip "
            "such a step, as is usual after an fp16 overflow"
        )


def _is_positive(value: object) -> bool:
    """Return True for a number above 0, finite or infinite."""
    return is_number(value) and value > 0
