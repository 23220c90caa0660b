"""How slices of memory get from rank to rank on CPUs: sent, or read by who needs them. What for, is exchange.py."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from weakref import finalize

import torch.distributed as dist
from torch import Tensor

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


class Reading(Way):
    """Ranks tell each other where slices lie, and read them, see process_memory.py."""

    arrives_unasked = False

    def __init__(self, group: dist.ProcessGroup, neighbours: Neighbours) -> None:
        self._group = group
        self._neighbours = neighbours
        self._tags = count(step=2)
        self._readers: Readers | None = None  # of what is kept

    def room(self, length: int) -> int:
        """One piece: nothing arrives before it is asked for."""
        return min(length, _PIECE)

    def post(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        return _Read(self._neighbours, outgoing, incoming, tag=next(self._tags))

    def post_kept(self, outgoing: Slices, incoming: Slices) -> Swap:
        """See `Way`."""
        if self._readers is None:
            self._readers = Readers.of(self._group, self._neighbours)
        return _KeptRead(self._neighbours, outgoing, incoming, tag=next(self._tags), readers=self._readers)


class _Read(Swap):
    def __init__(self, neighbours: Neighbours, outgoing: Slices, incoming: Slices, *, tag: int) -> None:
        self._neighbours, self._incoming = neighbours, incoming
        self._length, self._tag = _length(outgoing), tag
        for rank, slice_ in outgoing.items():
            neighbours.messages.tell(rank, tag, slice_.data_ptr())

    def pieces(self) -> Iterator[tuple[int, list[Tensor]]]:
        messages = self._neighbours.messages
        addresses = {rank: messages.hear(rank, self._tag)[0] for rank in self._incoming}
        step = _length(self._incoming)
        for start in range(0, self._length, step):
            found = []
            for rank, memory in self._incoming.items():
                into = memory[: self._length - start]
                self._neighbours.read(rank, addresses[rank] + start * into.element_size(), into)
                found.append(into)
            yield start, found
        for rank in self._incoming:  # it may be changed
            messages.tell(rank, self._tag + 1)

    def finish(self) -> None:
        for rank in self._incoming:
            self._neighbours.messages.hear(rank, self._tag + 1)


class _KeptRead(_Read):
    """Reading is told as ever, and counted besides: who drops what it showed, or ends, hears nothing any more."""

    def __init__(
        self, neighbours: Neighbours, outgoing: Slices, incoming: Slices, *, tag: int, readers: Readers
    ) -> None:
        super().__init__(neighbours, outgoing, incoming, tag=tag)
        readers.shown += 1
        self._departure = finalize(self, readers.keep, list(outgoing.values()))
        self._note = finalize(self, readers.note)  # once: called, or when this is dropped

    def pieces(self) -> Iterator[tuple[int, list[Tensor]]]:
        yield from super().pieces()
        self._note()

    def finish(self) -> None:
        super().finish()
        self._departure.detach()


def _length(slices: Slices) -> int:
    return next(iter(slices.values())).numel()
