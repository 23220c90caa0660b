"""The memory that an optimizer and its parameters hold on this rank, in bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .bucket import Bucket


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """What is held, padding included.

    Args:
        parameters: in the compute precision, frozen ones too.
        gradients: float32; whole ones, or at stage 2 this rank's slices.
        buffers: borrowed memory for whole gradients of the buckets that have them, at stage 2.
        arrivals: on CPUs, memory for the slices of other ranks, see cluster/exchange.py.
        masters: float32 copies, where parameters are in 16 bits.
        states: the inner optimizer's tensors.
        scalars: the inner optimizer's tensors of one entry, such as step counts.
    """

    parameters: int
    gradients: int
    buffers: int
    arrivals: int
    masters: int
    states: int
    scalars: int

    def items(self) -> list[tuple[str, int]]:
        """Names and bytes."""
        return [(each.name, getattr(self, each.name)) for each in fields(self)]


def held_bytes(
    buckets: Sequence[Bucket],
    frozen: Iterable[Parameter],
    optimizer: Optimizer,
    *,
    buffers: int,
    arrivals: int,
) -> HeldBytes:
    """Count what these hold together."""
    states = [each for state in optimizer.state.values() for each in _tensors(state)]
    return HeldBytes(
        parameters=sum(bucket.parameters.nbytes for bucket in buckets) + sum(each.nbytes for each in frozen),
        gradients=sum(
            bucket.own_gradients.nbytes
            if bucket.passes or bucket.gradients is None
            else bucket.gradients.nbytes
            for bucket in buckets
        ),
        buffers=buffers,
        arrivals=arrivals,
        masters=sum(bucket.masters.nbytes for bucket in buckets if bucket.has_masters),
        states=sum(each.nbytes for each in states if each.numel() > 1),
        scalars=sum(each.nbytes for each in states if each.numel() <= 1),
    )


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
