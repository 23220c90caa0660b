"""What is wrong with the arguments of a sharded optimizer, and with what was done to its parameters since."""

from collections.abc import Sequence
from math import isfinite

from ..cluster.mesh import divisors
from .bucket import Slot
from .parameter import ManagedParameter


def sharding_faults(*, stage: int, max_norm: float, norm_type: float, bucket_size: int) -> list[str]:
    """All that is wrong with these arguments of ShardedOptimizer, each with what is allowed."""
    checks = (
        (
            stage in (0, 1, 2),
            f"stage={stage}: use 0 (plain data parallelism), 1 (states shared out) or 2 (gradients too)",
        ),
        (max_norm >= 0, f"max_norm={max_norm}: it must be above 0, or 0 for no clipping"),
        (norm_type > 0, f"norm_type={norm_type}: it must be above 0, or inf for the largest magnitude"),
        (bucket_size >= 1, f"bucket_size={bucket_size}: it must be at least 1 element"),
    )
    return [fault for sound, fault in checks if not sound]


def zero_size_faults(zero_size: int, data_size: int) -> list[str]:
    """What is wrong with sharing out over this many of so many data-parallel ranks."""
    if zero_size in (-1, 0) or (zero_size > 0 and data_size % zero_size == 0):
        return []
    return [
        f"zero_size={zero_size} must divide the {data_size} data-parallel ranks: use one of "
        f"{', '.join(map(str, divisors(data_size)))}, or -1 for all of them"
    ]


def weight_size_faults(weight_size: int, data_size: int) -> list[str]:
    """What is wrong with this many of so many data-parallel ranks sharing out weights."""
    if weight_size >= 1 and data_size % weight_size == 0:
        return []
    return [
        f"weight_size={weight_size} must divide the {data_size} data-parallel ranks: use one of "
        f"{', '.join(map(str, divisors(data_size)))}"
    ]


def size_faults(zero_size: int, weight_size: int, *, num_ranks: int) -> list[str]:
    """Why a data axis of so many ranks cannot be shared out so."""
    return [*zero_size_faults(zero_size, num_ranks), *weight_size_faults(weight_size, num_ranks)]


def require_clip_norm(max_norm: float, norm_type: float) -> None:
    """Raise ValueError where gradients cannot be clipped to this norm."""
    checks = (
        (_is_above_0(max_norm), f"max_norm={max_norm!r}: it must be above 0; inf only measures the norm"),
        (
            _is_above_0(norm_type),
            f"norm_type={norm_type!r}: it must be above 0, or inf for the largest magnitude",
        ),
    )
    if faults := [fault for sound, fault in checks if not sound]:
        raise ValueError("; ".join(faults))


def require_clip_value(clip_value: float) -> None:
    """Raise ValueError where gradients cannot be clipped to this value."""
    if not _is_above_0(clip_value):
        raise ValueError(
            f"clip_value={clip_value!r}: it must be above 0; entries are clipped to -clip_value … clip_value"
        )


def _is_above_0(value: object) -> bool:
    """Whether it is a number above 0, infinite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def require_finite_norm(norm: float, norm_type: float) -> None:
    """Raise RuntimeError where a norm is infinite or NaN."""
    if not isfinite(norm):
        raise RuntimeError(
            f"the gradients' norm (norm_type={norm_type}) is {norm} and error_if_nonfinite=True: under fp16 an "
            "overflow now and then is usual and skips a step; leave error_if_nonfinite out to let it be"
        )


def require_untouched(slots: Sequence[Slot], frozen: Sequence[ManagedParameter]) -> None:
    """Raise RuntimeError where parameters were moved, retyped or unfrozen since boost."""
    for slot in slots:
        if not slot.is_in_place:
            raise RuntimeError(
                f"{slot.managed.name} is no longer in the memory that boost gave it (model.to(), .half() "
                "and parameter.data = … take it out): move and cast the model before boost"
            )
    for managed in frozen:
        if managed.parameter.requires_grad:
            raise RuntimeError(
                f"{managed.name} was frozen at boost and requires a gradient now, but nothing would "
                "update it: set requires_grad before boost"
            )
