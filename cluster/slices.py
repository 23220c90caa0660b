"""How slices of memory get from rank to rank on CPUs: sent, or read by who needs them. What for, is exchange.py."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from .messages import hear, numbers_of, tell
from .process_memory import Neighbours, find_neighbours

# In elements: 1 MiB of float32. Up to 16 times that it makes no difference.
_PIECE = 2**18

Slices = Mapping[int, Tensor]  # by rank: contiguous, equally long and of one format


class Swap(ABC):
    """Slices under way between all ranks of a group."""

    @abstractmethod
    def pieces(self) -> Iterator[tuple[int, list[Tensor]]]:
        """What comes from the other ranks, once: where each piece begins, and it from every one of them.

        A piece is there until the next is asked for.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until what goes out may be changed again; called once, after all pieces."""


class Way(ABC):
    """A way for slices to go. Every rank of the group posts the same swaps in the same order.

    Attributes:
        arrives_unasked: whether the memory for what comes is written to from `post` on, and not by `pieces`.
    """

    arrives_unasked: bool

    @abstractmethod
    def room(self, length: int) -> int:
        """How many elements of memory a rank's slice of so many needs if its pieces are asked for one by one."""

    @abstractmethod
    def post(self, outgoing: Slices, incoming: Slices) -> Swap:
        """Begin to give each other rank a slice and to get one from it.

        Args:
            outgoing: what each gets.
            incoming: memory for what comes from each: `room` for it, or for all of it.
        """


def find_way(group: dist.ProcessGroup) -> Way:
    """The quicker way that the group can go. Collective over it."""
    neighbours = find_neighbours(group)
    return Sending(group) if neighbours is None else Reading(group, neighbours)


class Sending(Way):
    """Slices are sent piece by piece, and summed up while the next pieces arrive."""

    arrives_unasked = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def room(self, length: int) -> int:
        """All of it: everything arrives on its own."""
        return length

    def post(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        return _Sent(self._group, outgoing, incoming)


class _Sent(Swap):
    def __init__(self, group: dist.ProcessGroup, outgoing: Slices, incoming: Slices) -> None:
        self._sends: list[dist.Work] = []
        self._receives: list[tuple[int, list[tuple[dist.Work, Tensor]]]] = []
        for start in range(0, _length(outgoing), _PIECE):
            piece = slice(start, start + _PIECE)
            self._sends += [group.send([slice_[piece]], rank, 0) for rank, slice_ in outgoing.items()]
            targets = [(rank, slice_[piece]) for rank, slice_ in incoming.items()]
            self._receives.append((start, [(group.recv([into], rank, 0), into) for rank, into in targets]))

    def pieces(self) -> Iterator[tuple[int, list[Tensor]]]:
        for start, receives in self._receives:
            for work, _ in receives:
                work.wait()
            yield start, [into for _, into in receives]

    def finish(self) -> None:
        for work in self._sends:
            work.wait()


_TAGS: WeakKeyDictionary[dist.ProcessGroup, "count[int]"] = WeakKeyDictionary()


class Reading(Way):
    """Ranks tell each other where slices lie, and read them, see process_memory.py."""

    arrives_unasked = False

    def __init__(self, group: dist.ProcessGroup, neighbours: Neighbours) -> None:
        self._group = group
        self._neighbours = neighbours
        # Of all that a group has had: what one left under way, with a model that is gone, must not meet another's.
        self._tags = _TAGS.setdefault(group, count(step=2))

    def room(self, length: int) -> int:
        """One piece: nothing arrives before it is asked for."""
        return min(length, _PIECE)

    def post(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        return _Read(self._group, self._neighbours, outgoing, incoming, tag=next(self._tags))


class _Read(Swap):
    def __init__(
        self,
        group: dist.ProcessGroup,
        neighbours: Neighbours,
        outgoing: Slices,
        incoming: Slices,
        *,
        tag: int,
    ) -> None:
        self._group, self._neighbours, self._incoming = group, neighbours, incoming
        self._length, self._tag = _length(outgoing), tag
        self._sends = tell(group, {rank: (slice_.data_ptr(),) for rank, slice_ in outgoing.items()}, tag)
        self._places = hear(group, incoming, tag)

    def pieces(self) -> Iterator[tuple[int, list[Tensor]]]:
        addresses = {rank: numbers_of(place)[0] for rank, place in self._places.items()}
        step = _length(self._incoming)
        for start in range(0, self._length, step):
            found = []
            for rank, memory in self._incoming.items():
                into = memory[: self._length - start]
                self._neighbours.read(rank, addresses[rank] + start * into.element_size(), into)
                found.append(into)
            yield start, found
        self._sends += tell(self._group, dict.fromkeys(addresses, (0,)), self._tag + 1)

    def finish(self) -> None:
        for read in hear(self._group, self._incoming, self._tag + 1).values():
            numbers_of(read)
        for work in self._sends:
            work.wait()


def _length(slices: Slices) -> int:
    return next(iter(slices.values())).numel()
