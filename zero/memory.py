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
    """Local bytes, padding included. What `cpu_offload` keeps on the CPU stands apart.

    Args:
        parameters: in the compute precision, frozen ones too.
        gradients: float32; whole ones, or at stage 2 this rank's slices.
        buffers: lent memory for whole gradients, at stage 2.
        masters: float32 copies, where parameters are in 16 bits.
        states: the inner optimizer's tensors.
        scalars: the inner optimizer's tensors of one entry, such as step counts.
        offloaded_gradients: on the CPU, float32: this rank's slices, for the step.
        offloaded_masters: on the CPU, float32, under every precision.
        offloaded_states: on the CPU, the inner optimizer's tensors.
    """

    parameters: int
    gradients: int
    buffers: int
    masters: int
    states: int
    scalars: int
    offloaded_gradients: int = 0
    offloaded_masters: int = 0
    offloaded_states: int = 0

    def items(self) -> list[tuple[str, int]]:
        """Names and bytes; of what is offloaded where something is."""
        every = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return [(name, nbytes) for name, nbytes in every if nbytes or not name.startswith("offloaded_")]


def held_bytes(
    buckets: Sequence[Bucket],
    frozen: Iterable[Parameter],
    optimizer: Optimizer,
    *,
    buffers: int,
) -> HeldBytes:
    """The bytes of buckets, frozen parameters and optimizer states together."""
    tensors = [each for state in optimizer.state.values() for each in _tensors(state)]
    states = sum(each.nbytes for each in tensors if each.numel() > 1)
    masters = sum(bucket.masters.nbytes for bucket in buckets if bucket.has_masters)
    is_offloaded = any(bucket.is_offloaded for bucket in buckets)
    return HeldBytes(
        parameters=sum(bucket.parameters.nbytes for bucket in buckets) + sum(each.nbytes for each in frozen),
        gradients=sum(
            bucket.own_gradients.nbytes
            if bucket.shards_gradients or bucket.gradients is None
            else bucket.gradients.nbytes
            for bucket in buckets
        ),
        buffers=buffers,
        masters=0 if is_offloaded else masters,
        states=0 if is_offloaded else states,
        scalars=sum(each.nbytes for each in tensors if each.numel() <= 1),
        offloaded_gradients=sum(bucket.stepped_gradients.nbytes for bucket in buckets if bucket.is_offloaded),
        offloaded_masters=masters if is_offloaded else 0,
        offloaded_states=states if is_offloaded else 0,
    )


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
