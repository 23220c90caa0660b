"""Means over a group, and slices gathered, of flat buffers. What a buffer holds is zero/'s.

[Note: slices from rank to rank] On CPUs every rank gets its own slice from every other rank, piece by piece, and
sums up itself. gloo's own collectives first copy whole buffers: of 128 MiB on two ranks (2 cores) its reduce-scatter
took 236 ms and its all-gather 188, where slices that are sent take 52 and 45, and 17 and 14 where they can be read
(process_memory.py). NCCL keeps its own.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather_single, reduce_scatter_single
from .slices import Swap, Way, find_way
from .traffic import OneCollective


class Waitable(Protocol):
    """Communication under way."""

    def wait(self) -> Any:
        """Return, or on CUDA let the current stream go on, when it is done."""
        ...


class Exchange:
    """Collectives over a group, in place on flat buffers whose length its size divides. Slice i is that of rank i.

    Every rank of the group calls the same methods in the same order, and waits in the same order.

    Args:
        group: the ranks. Collective over it.
        device: where the buffers are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._way = find_way(group) if device.type == "cpu" else None  # see [Note: slices from rank to rank]
        self._arrivals = torch.empty(0, dtype=torch.uint8)
        self._under_way: _Mean | None = None

    @property
    def nbytes(self) -> int:
        """The memory that is kept for what arrives."""
        return self._arrivals.nbytes

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of a buffer."""
        return flat.chunk(self.group.size())[self.group.rank()]

    def reduce_scatter_(self, flat: Tensor) -> Waitable:
        """Begin to bring the mean over the ranks into this rank's slice; the others keep what they hold."""
        if self._way is not None:
            return self._start(_Mean(self.group, self._way, flat))
        work: Waitable = reduce_scatter_single(
            self.own(flat), flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True
        )
        return work

    def all_reduce_(self, flat: Tensor) -> Waitable:
        """Begin to bring the mean over the ranks into the whole buffer."""
        if self._way is not None:
            return self._start(_MeanEverywhere(self.group, self._way, flat))
        work: Waitable = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        return work

    def all_gather_(self, flat: Tensor) -> Waitable:
        """Begin to fill the buffer with the slices that the ranks own."""
        if self._way is not None:
            return _Gather(self.group, self._way, flat, OneCollective("all_gather", flat.nbytes))
        work: Waitable = all_gather_single(flat, self.own(flat), group=self.group, async_op=True)
        return work

    def _start(self, mean: "_Mean") -> "_Mean":
        """Begin, once what arrived for the one before is summed up: both use the same memory."""
        if self._under_way is not None:
            self._under_way.advance()
        if self._arrivals.nbytes < mean.nbytes_arriving:
            self._arrivals = torch.empty(mean.nbytes_arriving, dtype=torch.uint8)
        mean.post(self._arrivals[: mean.nbytes_arriving])
        self._under_way = mean
        return mean


class _Mean:
    """A mean over the ranks of a group on its way into this rank's slice of a buffer."""

    name = "reduce_scatter"

    def __init__(self, group: dist.ProcessGroup, way: Way, flat: Tensor) -> None:
        self._group, self._way, self._flat = group, way, flat
        self._slices = flat.chunk(group.size())
        self._collective = OneCollective(self.name, flat.nbytes)
        self._summing: Swap | None = None
        self._finishing: Swap | None = None

    @property
    def nbytes_arriving(self) -> int:
        """The memory that `post` takes."""
        own = self._own
        return self._way.room(own.numel()) * own.element_size() * (self._group.size() - 1)

    def post(self, arrivals: Tensor) -> None:
        """Begin; nobody else uses this memory until `advance`."""
        others = _others(self._group)
        memory = arrivals.view(self._own.dtype).view(len(others), -1)
        with self._collective:
            self._summing = self._way.post(
                {rank: self._slices[rank] for rank in others},
                dict(zip(reversed(others), memory, strict=True)),
            )

    def advance(self) -> None:
        """Sum up what arrives, once."""
        if self._summing is None:
            return
        self._finishing, self._summing = self._summing, None
        for start, pieces in self._finishing.pieces():
            own = self._own[start : start + pieces[0].numel()]
            for piece in pieces:
                own.add_(piece)
            own.div_(self._group.size())

    def wait(self) -> None:
        """Have the mean."""
        self.advance()
        self._finish()

    def _finish(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.finish()

    @property
    def _own(self) -> Tensor:
        return self._slices[self._group.rank()]


class _MeanEverywhere(_Mean):
    """A mean over the ranks of a group on its way into the whole buffers of all."""

    name = "all_reduce"
    _gathering: "_Gather | None" = None

    def advance(self) -> None:
        """Sum up what arrives, and begin to gather the sums, once."""
        if self._summing is None:
            return
        super().advance()
        self._finish()  # the gather writes over what went out
        self._gathering = _Gather(self._group, self._way, self._flat, self._collective)

    def wait(self) -> None:
        """Have the mean."""
        self.advance()
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.wait()


class _Gather:
    """The slices of all ranks on their way into the whole buffers of all."""

    def __init__(self, group: dist.ProcessGroup, way: Way, flat: Tensor, collective: OneCollective) -> None:
        others, slices = _others(group), flat.chunk(group.size())
        with collective:
            self._swap = way.post(
                dict.fromkeys(others, slices[group.rank()]), {rank: slices[rank] for rank in reversed(others)}
            )

    def wait(self) -> None:
        """Have them; once."""
        for _ in self._swap.pieces():
            pass
        self._swap.finish()


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks from the next one on: where all go by this order, nobody is asked by all at once."""
    size, rank = group.size(), group.rank()
    return [(rank + step) % size for step in range(1, size)]
