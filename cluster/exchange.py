"""Means over a group, and slices gathered, of flat buffers. What a buffer holds is zero/'s.

[Note: slices from rank to rank] On CPUs every rank sends every other rank that one's slice, in pieces, and each sums
up its own. gloo's own collectives first copy whole buffers: of 128 MiB on two ranks (2 cores) its reduce-scatter took
236 ms and its all-gather 188, where slices take 52 and 45. NCCL keeps its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather_single, reduce_scatter_single
from .traffic import OneCollective

# In elements: 4 MiB of float32. From 1 to 16 MiB it makes no difference.
_PIECE = 2**20


class Waitable(Protocol):
    """Communication under way."""

    def wait(self) -> Any:
        """Return, or on CUDA let the current stream go on, when it is done."""
        ...


class Exchange:
    """Collectives over a group, in place on flat buffers whose length its size divides. Slice i is that of rank i.

    Every rank of the group calls the same methods in the same order. What is under way may be waited for in any.

    Args:
        group: the ranks.
        device: where the buffers are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._sends_slices = device.type == "cpu"  # see [Note: slices from rank to rank]
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
        if self._sends_slices:
            return self._start(_Mean(self.group, flat))
        work: Waitable = reduce_scatter_single(
            self.own(flat), flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True
        )
        return work

    def all_reduce_(self, flat: Tensor) -> Waitable:
        """Begin to bring the mean over the ranks into the whole buffer."""
        if self._sends_slices:
            return self._start(_MeanEverywhere(self.group, flat))
        work: Waitable = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        return work

    def all_gather_(self, flat: Tensor) -> Waitable:
        """Begin to fill the buffer with the slices that the ranks own."""
        if self._sends_slices:
            with OneCollective("all_gather", flat.nbytes):
                return _gather(self.group, flat)
        work: Waitable = all_gather_single(flat, self.own(flat), group=self.group, async_op=True)
        return work

    def _start(self, mean: "_Mean") -> "_Mean":
        """Post its transfers, once what arrived for the one before is summed up: both use the same memory."""
        if self._under_way is not None:
            self._under_way.advance()
        if self._arrivals.nbytes < mean.nbytes_arriving:
            self._arrivals = torch.empty(mean.nbytes_arriving, dtype=torch.uint8)
        mean.post(self._arrivals[: mean.nbytes_arriving])
        self._under_way = mean
        return mean


class _Swap(NamedTuple):
    """Slices on their way between all ranks of a group.

    Attributes:
        sends: this rank's.
        receives: for every piece of a slice, where it begins and its receives from each other rank.
    """

    sends: list[Waitable]
    receives: list[tuple[int, list[Waitable]]]

    @staticmethod
    def post(
        group: dist.ProcessGroup, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> "_Swap":
        """Send `outgoing` to each other rank and receive `incoming` from it, piece by piece; all of one length."""
        swap = _Swap([], [])
        for start in range(0, next(iter(outgoing.values())).numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            swap.sends.extend(group.send([outgoing[rank][piece]], rank, 0) for rank in outgoing)
            swap.receives.append((start, [group.recv([incoming[rank][piece]], rank, 0) for rank in incoming]))
        return swap

    def wait(self) -> None:
        """Have all of it, once."""
        for works in (*(works for _, works in self.receives), self.sends):
            for work in works:
                work.wait()


class _Mean:
    """A mean over the ranks of a group on its way into this rank's slice of a buffer."""

    name = "reduce_scatter"

    def __init__(self, group: dist.ProcessGroup, flat: Tensor) -> None:
        self._group = group
        self._slices = flat.chunk(group.size())
        self._collective = OneCollective(self.name, flat.nbytes)
        self._swap: _Swap | None = None

    @property
    def nbytes_arriving(self) -> int:
        """As much as all other ranks send."""
        return self._own.nbytes * (self._group.size() - 1)

    def post(self, arrivals: Tensor) -> None:
        """Begin; nobody else uses this memory until `advance`."""
        others = _others(self._group)
        self._arrivals = arrivals.view(self._own.dtype).view(len(others), -1)
        with self._collective:
            self._swap = _Swap.post(
                self._group,
                {rank: self._slices[rank] for rank in others},
                dict(zip(reversed(others), self._arrivals, strict=True)),
            )

    def advance(self) -> None:
        """Sum up what arrives, once."""
        if self._swap is None:
            return
        swap, self._swap = self._swap, None
        for start, works in swap.receives:
            own = self._own[start : start + _PIECE]
            for work, arrived in zip(works, self._arrivals[:, start : start + _PIECE], strict=True):
                work.wait()
                own.add_(arrived)
            own.div_(self._group.size())
        for send in swap.sends:
            send.wait()

    def wait(self) -> None:
        """Have the mean."""
        self.advance()

    @property
    def _own(self) -> Tensor:
        return self._slices[self._group.rank()]


class _MeanEverywhere(_Mean):
    """A mean over the ranks of a group on its way into the whole buffers of all."""

    name = "all_reduce"

    def __init__(self, group: dist.ProcessGroup, flat: Tensor) -> None:
        super().__init__(group, flat)
        self._flat = flat
        self._gathering: _Swap | None = None

    def advance(self) -> None:
        """Sum up what arrives, and begin to gather the sums, once."""
        if self._swap is None:
            return
        super().advance()
        with self._collective:
            self._gathering = _gather(self._group, self._flat)

    def wait(self) -> None:
        """Have the mean."""
        self.advance()
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.wait()


def _gather(group: dist.ProcessGroup, flat: Tensor) -> _Swap:
    """Begin to fill a buffer with the slices that the ranks own."""
    others, slices = _others(group), flat.chunk(group.size())
    return _Swap.post(
        group, dict.fromkeys(others, slices[group.rank()]), {rank: slices[rank] for rank in reversed(others)}
    )


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks from the next one on: if all send in this order, nobody is sent to by all at once."""
    size, rank = group.size(), group.rank()
    return [(rank + step) % size for step in range(1, size)]
