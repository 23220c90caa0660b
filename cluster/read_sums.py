"""Sums over the ranks of one machine, which read each other's memory. Collectives that use them are collectives.py.

[Note: sums by reading] Every rank copies what it brings into memory of its own that the others may read, tells them
where that is, hears it of all, and adds all up in the order of ranks, so that the sums are equal to the bit. What it
was told for one sum also says that the one before has been read; so with two such buffers, used in turn, nobody waits
for the end of another's reading. A sum that has begun is ended before the next one begins. Of 4 MiB on two ranks (2
cores) gloo's all-reduce took 4.6 to 4.9 ms and this 2.0 to 2.2, of 512 KiB 0.9 and 0.3 to 0.5.

Nothing follows the last sum of a group that would say that it has been read; see readers.py.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from .large_pages import large_pages
from .process_memory import Neighbours, find_neighbours
from .readers import Readers
from .traffic import OneCollective

_PIECE = 2**17  # elements that are read and added at a time: they stay in a core's cache
# With more ranks everybody's reading of everything costs more than a ring.
_MOST_RANKS = 4
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ReadSums:
    """The memory for sums over one group.

    Args:
        neighbours: its processes.
        rank: of this process.
        readers: how many sums they have ended.
    """

    def __init__(self, neighbours: Neighbours, rank: int, readers: Readers) -> None:
        self._neighbours, self._rank, self._readers = neighbours, rank, readers
        self._others = [other for other in neighbours.pids if other != rank]
        self._shown = [torch.empty(0, dtype=torch.uint8)] * 2
        self._read = torch.empty(0, dtype=torch.uint8)
        self._number = 0
        self._under_way: _Sum | None = None

    def begin(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        """Begin the sum of `x` over the group. 16-bit formats are added up in float32.

        Returns:
            What waits for the other ranks and gives the sum, contiguous. It raises RuntimeError, on every rank, where
            the ranks bring tensors of different sizes.
        """
        if self._under_way is not None:
            self._under_way()
        self._under_way = _Sum(self, x, group)
        return self._under_way

    def tell(self, own: Tensor) -> None:
        """Tell all other ranks where this one's tensor is."""
        for rank in self._others:
            self._neighbours.messages.tell(rank, 0, own.data_ptr(), own.nbytes)

    def end(self, own: Tensor, total: Tensor) -> None:
        """Fill in the sum, once all ranks have come to it."""
        self._under_way = None
        try:
            self._fill(own, total, self._addresses(own))
        finally:
            self._readers.note()

    def _addresses(self, own: Tensor) -> dict[int, int]:
        """Where the tensors of all other ranks are, once they have come to the same sum."""
        heard = {rank: self._neighbours.messages.hear(rank, 0) for rank in self._others}
        sizes = {self._rank: own.nbytes, **{rank: nbytes for rank, (_, nbytes) in heard.items()}}
        if len(set(sizes.values())) > 1:
            brought = ", ".join(f"rank {rank} of the group {sizes[rank]} bytes" for rank in sorted(sizes))
            raise RuntimeError(
                f"ranks that compute the same bring tensors of different sizes to a sum: {brought}. Give every rank "
                "of a tensor-parallel group the same batch"
            )
        return {rank: address for rank, (address, _) in heard.items()}

    def _fill(self, own: Tensor, total: Tensor, addresses: dict[int, int]) -> None:
        """Fill in the sum from where the others' tensors are."""
        flat, length = total.view(-1), min(_PIECE, own.numel())
        if self._read.nbytes < length * own.itemsize:
            self._read = torch.empty(length * own.itemsize, dtype=torch.uint8)
        read = self._read[: length * own.itemsize].view(own.dtype)
        for start in range(0, own.numel(), _PIECE):
            piece = flat[start : start + _PIECE]
            self._add(piece, own[start : start + _PIECE], read[: piece.numel()], addresses, start)

    def _add(self, piece: Tensor, own: Tensor, read: Tensor, addresses: dict[int, int], start: int) -> None:
        """Fill a piece of the sum, in the order of ranks."""
        running = piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
        for rank in range(len(addresses) + 1):
            if rank != self._rank:
                self._neighbours.read(rank, addresses[rank] + start * read.itemsize, read)
            brought = own if rank == self._rank else read
            running.copy_(brought) if rank == 0 else running.add_(brought)
        if running is not piece:
            piece.copy_(running)

    def leave(self) -> None:
        """This rank sums up no more; the others may still read what it brought."""
        self._readers.end()
        self._readers.keep(self._shown)

    def show(self, x: Tensor) -> Tensor:
        """A flat copy where the others may read it until the sum after the next."""
        self._number = 1 - self._number
        self._readers.shown += 1
        if self._shown[self._number].nbytes < x.nbytes:
            self._shown[self._number] = large_pages(torch.empty(x.nbytes, dtype=torch.uint8))
        shown = self._shown[self._number][: x.nbytes].view(x.dtype)
        shown.view(x.shape).copy_(x)
        return shown


class _Sum:
    """One sum that has begun. Called, it gives it; called again, it gives the same."""

    def __init__(self, sums: ReadSums, x: Tensor, group: dist.ProcessGroup) -> None:
        self._sums = sums
        self._own = sums.show(x)
        self._total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._is_open = True
        with OneCollective("all_reduce", self._own.nbytes, group):
            sums.tell(self._own)

    def __call__(self) -> Tensor:
        if self._is_open:
            self._is_open = False
            self._sums.end(self._own, self._total)
        return self._total


def begin_sum_by_reading(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor] | None:
    """Begin the sum of `x` over the group; what is returned gives it, in a new tensor. None where it cannot be had so.

    Every rank of the group calls it with the same shape and format. The first time it is collective in itself.
    """
    if (
        x.device.type != "cpu"
        or x.dtype not in _FLOATS
        or not 1 < group.size() <= _MOST_RANKS
        or not x.numel()
    ):
        return None
    if group not in _SUMS:
        neighbours = find_neighbours(group)
        _SUMS[group] = None if neighbours is None else _open(group, neighbours)
    sums = _SUMS[group]
    return None if sums is None else sums.begin(x, group)


def _open(group: dist.ProcessGroup, neighbours: Neighbours) -> ReadSums:
    """The memory for sums over a group, there until the others need it no more. One all-gather of an integer."""
    sums = ReadSums(neighbours, group.rank(), Readers.of(group, neighbours))
    finalize(group, sums.leave)  # also where the process ends
    return sums


# By group, as long as that lives; none refers back to its group.
_SUMS: WeakKeyDictionary[dist.ProcessGroup, ReadSums | None] = WeakKeyDictionary()
