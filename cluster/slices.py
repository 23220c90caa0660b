"""How slices of memory get from rank to rank on CPUs: sent, or read by who needs them. What for, is exchange.py."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch import Tensor

from .messages import hear, numbers_of, tell
from .process_memory import Neighbours, find_neighbours
from .readers import Readers

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

    @abstractmethod
    def post_kept(self, outgoing: Slices, incoming: Slices) -> Swap:
        """`post` of slices that are there until the others have them, also if the swap is dropped or the process ends.

        The first time it is collective in itself.
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

    def post_kept(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        return _KeptSent(self._group, outgoing, incoming)


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


class _KeptSent(_Sent):
    def __init__(self, group: dist.ProcessGroup, outgoing: Slices, incoming: Slices) -> None:
        super().__init__(group, outgoing, incoming)
        self._departure = finalize(self, _wait_for_sends, self._sends)

    def finish(self) -> None:
        super().finish()
        self._departure.detach()


def _wait_for_sends(sends: Iterable[dist.Work]) -> None:
    """Wait until they are under way for good, or nobody is there to receive them."""
    for work in sends:
        with suppress(RuntimeError):
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
        self._readers: Readers | None = None  # of what is kept

    def room(self, length: int) -> int:
        """One piece: nothing arrives before it is asked for."""
        return min(length, _PIECE)

    def post(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        return _Read(self._group, self._neighbours, outgoing, incoming, tag=next(self._tags))

    def post_kept(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        if self._readers is None:
            self._readers = Readers.of(self._group, self._neighbours)
        return _KeptRead(
            self._group,
            self._neighbours,
            outgoing,
            incoming,
            tag=next(self._tags),
            readers=self._readers,
        )


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
        self._tell_read(addresses)

    def _tell_read(self, ranks: Iterable[int]) -> None:
        self._sends += tell(self._group, dict.fromkeys(ranks, (0,)), self._tag + 1)

    def finish(self) -> None:
        for read in hear(self._group, self._incoming, self._tag + 1).values():
            numbers_of(read)
        for work in self._sends:
            work.wait()


class _KeptRead(_Read):
    """Reading is told as ever, and counted besides: who drops what it showed, or ends, hears nothing any more."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        neighbours: Neighbours,
        outgoing: Slices,
        incoming: Slices,
        *,
        tag: int,
        readers: Readers,
    ) -> None:
        super().__init__(group, neighbours, outgoing, incoming, tag=tag)
        readers.shown += 1
        self._departure = finalize(self, readers.keep, list(outgoing.values()))
        self._note = finalize(self, readers.note)  # once: called, or when this is dropped

    def pieces(self) -> Iterator[tuple[int, list[Tensor]]]:
        yield from super().pieces()
        self._note()

    def _tell_read(self, ranks: Iterable[int]) -> None:
        with suppress(RuntimeError):  # who ends or drops what it showed needs not be told
            super()._tell_read(ranks)

    def finish(self) -> None:
        super().finish()
        self._departure.detach()


def _length(slices: Slices) -> int:
    return next(iter(slices.values())).numel()
