"""How far the ranks of a group are with reading each other's memory, and memory that is kept until they are done.

[Note: the last reading] Who reads another process's memory is in nobody's way there, and nothing waits for it when a
process ends or drops what is read. So every rank counts what it has read, where the others may see it. Memory that is
dropped before all others have counted as far is kept, and a process that ends waits for them first, unless an error
ends it.
"""

import ctypes
from collections.abc import Mapping, Sequence
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import gather_integers
from .messages import is_ended_by_an_error, wait_at_the_end
from .process_memory import Neighbours

_NO_MORE = 2**62  # the count of a rank that reads nothing any more
# For others, when a process ends: they may do much before they look. Who ends looks no more, and is waited for no more.
_PATIENCE_SECONDS = 600.0


class Readers:
    """What the ranks of a group show each other, and have read of it, counted.

    Args:
        neighbours: their processes.
        own: this rank's count of what it has read. It is never freed: others look at it as long as they live.
        places: where the other ranks' counts are, by rank.

    Attributes:
        shown: how many things this rank has shown to all others.
    """

    def __init__(self, neighbours: Neighbours, own: ctypes.c_int64, places: Mapping[int, int]) -> None:
        self.shown = 0
        self._neighbours, self._own, self._places = neighbours, own, places

    @staticmethod
    def of(group: dist.ProcessGroup, neighbours: Neighbours) -> "Readers":
        """Those of a group that has shown nothing yet. One all-gather of an integer."""
        if not _COUNTS:  # what is made first runs last when the process ends: others only put into _LEFT then
            finalize(Readers, _wait_for_all)
        own = ctypes.c_int64(0)
        _COUNTS.append(own)
        every = gather_integers((ctypes.addressof(own),), group, "connecting the ranks")
        places = {rank: place for rank, (place,) in enumerate(every) if rank != group.rank()}
        return Readers(neighbours, own, places)

    def note(self) -> None:
        """This rank has read one more of what the others show, or never will."""
        self._own.value += 1

    def end(self) -> None:
        """This rank reads no more."""
        self._own.value = _NO_MORE

    def are_done(self) -> bool:
        """Whether all other ranks have read all that this one has shown, or are gone."""
        return all(self._count_of(rank) >= self.shown for rank in self._places)

    def keep(self, memory: Sequence[Tensor]) -> None:
        """Keep what this rank has shown, and needs no more, until the others have read it. It is not written to."""
        _LEFT[:] = [left for left in _LEFT if not left[0].are_done()]
        if not self.are_done():
            _LEFT.append((self, memory))

    def _count_of(self, rank: int) -> int:
        count = torch.empty(1, dtype=torch.int64)
        try:
            self._neighbours.read(rank, self._places[rank], count)
        except ConnectionError:  # it is gone
            return _NO_MORE
        return int(count)


# Of all that ever were, 8 bytes each.
_COUNTS: list[ctypes.c_int64] = []
_LEFT: list[tuple[Readers, Sequence[Tensor]]] = []


def _wait_for_all() -> None:
    """Wait until what was left has been read; not in a process that an error ends, for which others may wait."""
    if is_ended_by_an_error():
        return
    for count in _COUNTS:  # a process that ends reads no more, or two that end would wait for each other
        count.value = _NO_MORE
    wait_at_the_end(lambda: all(readers.are_done() for readers, _ in _LEFT), _PATIENCE_SECONDS)
