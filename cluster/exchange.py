"""Means over a group, and slices gathered, of flat buffers. What a buffer holds is zero/'s.

[Note: slices from rank to rank] On CPUs every rank gets its own slice from every other rank, piece by piece, and
sums up itself. gloo's own collectives first copy whole buffers: of 128 MiB on two ranks (2 cores) its reduce-scatter
took 236 ms and its all-gather 188, where slices that are sent take 52 and 45, and 17 and 14 where they can be read
(process_memory.py). NCCL keeps its own.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import ParallelMesh
from .renamed import all_gather_single, reduce_scatter_single
from .slices import Slices, Swap, Way, find_way
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
        self._begun: list[_Transfer] = []
        self._late: list[_LateGather] = []

    @property
    def nbytes(self) -> int:
        """The memory that is kept for what arrives, and for what single ranks may still want."""
        return self._arrivals.nbytes + sum(gather.kept.nbytes for gather in self._late)

    @property
    def ends_together(self) -> bool:
        """Whether what was begun ends only if every rank waits for it."""
        return self._way is not None

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of a buffer."""
        return flat.chunk(self.group.size())[self.group.rank()]

    def reduce_scatter_(self, flat: Tensor) -> Waitable:
        """Begin to bring the mean over the ranks into this rank's slice; the others keep what they hold."""
        if self._way is not None:
            return self._begin(
                _Mean(self, self._way, flat, OneCollective("reduce_scatter", flat.nbytes, self.group))
            )
        work: Waitable = reduce_scatter_single(
            self.own(flat), flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True
        )
        return work

    def all_reduce_(self, flat: Tensor) -> Waitable:
        """Begin to bring the mean over the ranks into the whole buffer."""
        if self._way is not None:
            return self._begin(
                _MeanEverywhere(self, self._way, flat, OneCollective("all_reduce", flat.nbytes, self.group))
            )
        work: Waitable = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        return work

    def all_gather_(self, flat: Tensor) -> Waitable:
        """Begin to fill the buffer with the slices that the ranks own."""
        if self._way is not None:
            return self._begin(
                _Gather(self, self._way, flat, OneCollective("all_gather", flat.nbytes, self.group))
            )
        work: Waitable = all_gather_single(flat, self.own(flat), group=self.group, async_op=True)
        return work

    def all_gather_later_(self, flat: Tensor) -> Waitable:
        """`all_gather_`, for which any rank may wait at any time before `release`, and then write to the buffer.

        On CPUs a copy of the own slice is kept for the others until then; until they have it where that never comes,
        since the exchange is dropped or the process ends. The first time it is collective in itself.
        """
        if self._way is None:
            return self.all_gather_(flat)
        self._late.append(
            _LateGather(self, self._way, flat, OneCollective("all_gather", flat.nbytes, self.group))
        )
        return self._late[-1]

    def release(self) -> None:
        """Have what began to be gathered, and wait until the other ranks have it too. Every rank calls it."""
        for gather in self._late:
            gather.wait()
        for gather in self._late:
            gather.finish()
        self._late.clear()

    def take_all(self) -> None:
        """Have everything that has begun come in: a rank that waits for one thing holds no other rank up in another."""
        for transfer in self._begun:
            transfer.take()
        self._begun.clear()

    def _begin(self, transfer: "_Transfer") -> "_Transfer":
        """Remember what `take_all` takes."""
        self._begun.append(transfer)
        return transfer

    def arrivals(self, rows: int, length: int, dtype: torch.dtype) -> Tensor:
        """Memory (rows, length) that all transfers share, one after the other."""
        nbytes = rows * length * dtype.itemsize
        if self._arrivals.nbytes < nbytes:
            self._arrivals = torch.empty(nbytes, dtype=torch.uint8)
        return self._arrivals[:nbytes].view(dtype).view(rows, length)


def exchange_of(mesh: ParallelMesh, group: dist.ProcessGroup) -> Exchange:
    """The one exchange of a group of the mesh, which all that use it share. Collective over the group at first.

    Two of them would take each other's messages.
    """
    of_mesh = _EXCHANGES.setdefault(mesh, {})
    if group not in of_mesh:
        of_mesh[group] = Exchange(group, mesh.device)
    return of_mesh[group]


_EXCHANGES: WeakKeyDictionary[ParallelMesh, dict[dist.ProcessGroup, Exchange]] = WeakKeyDictionary()


class _Transfer(ABC):
    """Slices of a buffer under way. Making it begins.

    Args:
        exchange: between whom.
        way: how they go.
        flat: the buffer.
        collective: as what they are counted.
    """

    def __init__(self, exchange: Exchange, way: Way, flat: Tensor, collective: OneCollective) -> None:
        self._exchange, self._way, self._flat, self._collective = exchange, way, flat, collective
        size, rank = exchange.group.size(), exchange.group.rank()
        self._slices = flat.chunk(size)
        # From the next one on: where all go by this order, nobody is asked by all at once.
        self._others = [(rank + step) % size for step in range(1, size)]
        self._is_open = True
        with collective:
            self._swap = self._post()

    @abstractmethod
    def _post(self) -> Swap:
        """Begin."""

    @abstractmethod
    def take(self) -> None:
        """Have what comes from the others, once."""

    def wait(self) -> None:
        """Have the result. Once more does nothing."""
        if self._is_open:
            self._is_open = False
            self._exchange.take_all()
            self.finish()

    def finish(self) -> None:
        """Wait until the others have what goes out."""
        self._swap.finish()

    @property
    def _own(self) -> Tensor:
        return self._slices[self._exchange.group.rank()]


class _Mean(_Transfer):
    """A mean over the ranks on its way into this rank's slice."""

    def _post(self) -> Swap:
        if self._way.arrives_unasked:
            self._exchange.take_all()  # what came before is in the memory where this arrives
        rows = self._exchange.arrivals(len(self._others), self._way.room(self._own.numel()), self._own.dtype)
        return self._way.post(
            {rank: self._slices[rank] for rank in self._others},
            dict(zip(reversed(self._others), rows, strict=True)),
        )

    def take(self) -> None:
        """Sum up."""
        for start, pieces in self._swap.pieces():
            own = self._own[start : start + pieces[0].numel()]
            total = own.float()  # itself, where it is
            for piece in pieces:
                total.add_(piece)
            own.copy_(total.div_(len(self._slices)))


class _MeanEverywhere(_Mean):
    """A mean over the ranks on its way into the whole buffers of all."""

    def wait(self) -> None:
        """Have the result. Once more does nothing."""
        if self._is_open:
            super().wait()
            gather = _Gather(self._exchange, self._way, self._flat, self._collective)
            gather.take()
            gather.finish()


class _Gather(_Transfer):
    """The slices of all ranks on their way into the whole buffers of all."""

    def _post(self) -> Swap:
        return self._way.post(dict.fromkeys(self._others, self._own), self._incoming)

    @property
    def _incoming(self) -> Slices:
        return {rank: self._slices[rank] for rank in reversed(self._others)}

    def take(self) -> None:
        """Have them in place."""
        for _ in self._swap.pieces():
            pass


class _LateGather(_Gather):
    """Slices that each rank takes when it likes, from copies.

    Attributes:
        kept: the copy of this rank's.
    """

    def _post(self) -> Swap:
        self.kept = self._own.clone()
        return self._way.post_kept(dict.fromkeys(self._others, self.kept), self._incoming)

    def wait(self) -> None:
        """Have the slices in place. Once more does nothing."""
        if self._is_open:
            self._is_open = False
            self.take()
