"""Tensors from one process to another: sent, or on CPUs of one machine read. What they are is pipeline/transport.py's.

[Note: reading what is sent] The sender tells where a tensor lies and keeps it there; the receiver copies it when it is
waited for, in its own thread, and says so. Nothing is copied twice and no other thread takes part: of 512 KiB gloo's
way takes 202 µs and this 98, of a few bytes 79 and 23 (2 cores).

[Note: expected is not read] A tensor is read when its receiver waits for it, and not when it begins to receive it, with
which gloo's way is done: two ranks that waited until the other one has read could both wait for ever. So of a large
tensor the receiver also tells that it expects it. Small ones may be under way as many as there are.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from .agreement import gather_integers
from .exchange import Waitable
from .mesh import ParallelMesh
from .process_memory import Neighbours, find_neighbours
from .traffic import OneCollective

_LARGE = 2**20  # bytes, see [Note: expected is not read]


class Departure(Protocol):
    """A tensor that is being sent."""

    @property
    def is_done(self) -> bool:
        """Whether it is known that `wait` returns at once."""
        ...

    def wait(self) -> Any:
        """Return, or on CUDA let the current stream go on, when the tensor may be changed."""
        ...

    def wait_until_expected(self) -> Any:
        """Return when the other rank has begun to receive it, or will not mind how many are under way."""
        ...


class Direct(Protocol):
    """A way for tensors between the ranks of a group.

    What one rank sends to another, that one receives in the same order. Everything raises RuntimeError where the other
    rank is lost.
    """

    def send(self, tensor: Tensor, rank: int) -> Departure:
        """Begin to send a contiguous tensor, which the caller keeps as it is until that was waited for."""
        ...

    def receive(self, tensor: Tensor, rank: int) -> Waitable:
        """Begin to fill a contiguous tensor with one of its size that a rank sends."""
        ...

    def close(self) -> None:
        """Let others that wait for this rank know that nothing more comes, where they can be told."""
        ...


def direct_ways(mesh: ParallelMesh, count: int) -> list[Direct]:
    """So many ways along the axis pp, of which none waits for what another one carries. Collective over the world."""
    group = mesh.group("pp")
    neighbours = find_neighbours(group) if mesh.device.type == "cpu" else None
    if not all(
        near for (near,) in gather_integers((int(neighbours is not None),), None, "connecting the ranks")
    ):
        return [_Sending(each) for each in mesh.pipeline_groups(count)]
    assert neighbours is not None
    return [_Reading(group, neighbours, number) for number in range(count)]


class _Sending:
    """By the group's own messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int) -> Departure:
        """See `Direct`."""
        return _Sent(self._group.send([tensor], rank, 0))

    def receive(self, tensor: Tensor, rank: int) -> Waitable:
        """See `Direct`."""
        return self._group.recv([tensor], rank, 0)

    def close(self) -> None:
        """Others notice when the group is gone."""


@dataclass(eq=False)
class _Sent:
    work: dist.Work
    is_done: bool = False

    def wait(self) -> None:
        if not self.is_done:  # each once: gloo would wait for a further tensor
            self.work.wait()
            self.is_done = True

    wait_until_expected = wait


class _Reading:
    """See [Note: reading what is sent] and [Note: expected is not read].

    Args:
        group: between whom.
        neighbours: its processes.
        number: what only this one of their ways has.
    """

    def __init__(self, group: dist.ProcessGroup, neighbours: Neighbours, number: int) -> None:
        self._group, self._neighbours = group, neighbours
        self._sent_tag, self._expected_tag, self._read_tag = range(3 * number, 3 * number + 3)
        # By rank and tag: how many tensors were sent to it of which it will tell that, and of how many it has.
        self._due: Counter[tuple[int, int]] = Counter()
        self._told: Counter[tuple[int, int]] = Counter()
        self._expected: dict[int, deque[_Receive]] = defaultdict(deque)

    def send(self, tensor: Tensor, rank: int) -> Departure:
        """See `Direct`."""
        with OneCollective("send", tensor.nbytes, self._group):
            self._neighbours.messages.tell(rank, self._sent_tag, tensor.data_ptr(), tensor.nbytes)
        expected, read = (rank, self._expected_tag), (rank, self._read_tag)
        self._due[expected] += tensor.nbytes >= _LARGE
        self._due[read] += 1
        return _Shown(self, rank, self._due[expected], self._due[read])

    def receive(self, tensor: Tensor, rank: int) -> Waitable:
        """See `Direct`."""
        with OneCollective("recv", tensor.nbytes, self._group):
            self._expected[rank].append(_Receive(self, rank, tensor))
        if tensor.nbytes >= _LARGE:
            self._neighbours.messages.tell(rank, self._expected_tag)
        return self._expected[rank][-1]

    def close(self) -> None:
        """See `Direct`. All ways of the same neighbours end with this one."""
        self._neighbours.messages.close()

    def wait_until_expected(self, rank: int, number: int) -> None:
        """Wait until a rank expects so many of the large tensors for it."""
        self._wait_until_told(rank, self._expected_tag, number)

    def wait_until_read(self, rank: int, number: int) -> None:
        """Wait until a rank has read so many of the tensors for it."""
        self._wait_until_told(rank, self._read_tag, number)

    def is_read(self, rank: int, number: int) -> bool:
        """Whether it is known that a rank has read so many of the tensors for it."""
        tag = self._read_tag
        return self._told[rank, tag] + self._neighbours.messages.count_heard(rank, tag) >= number

    def take_next(self, rank: int) -> None:
        """Read the first tensor that is expected of a rank."""
        receive = self._expected[rank][0]
        address, nbytes = self._neighbours.messages.hear(rank, self._sent_tag)
        if nbytes != receive.tensor.nbytes:
            raise RuntimeError(
                f"rank {rank} of the group sends {nbytes} bytes where {receive.tensor.nbytes} are expected"
            )
        try:
            self._neighbours.read(rank, address, receive.tensor)
        except ConnectionError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        self._neighbours.messages.tell(rank, self._read_tag)
        self._expected[rank].popleft().is_done = True

    def _wait_until_told(self, rank: int, tag: int, number: int) -> None:
        while self._told[rank, tag] < number:
            self._neighbours.messages.hear(rank, tag)
            self._told[rank, tag] += 1


class _Shown(NamedTuple):
    """A tensor that a rank is to read.

    Args:
        way: on which.
        rank: who.
        num_large: how many large ones it has been sent with this.
        number: how many at all.
    """

    way: _Reading
    rank: int
    num_large: int
    number: int

    @property
    def is_done(self) -> bool:
        return self.way.is_read(self.rank, self.number)

    def wait(self) -> None:
        self.way.wait_until_read(self.rank, self.number)
        self.way.wait_until_expected(self.rank, self.num_large)  # told before, and to be remembered no more

    def wait_until_expected(self) -> None:
        self.way.wait_until_expected(self.rank, self.num_large)


@dataclass(eq=False)
class _Receive:
    way: _Reading
    rank: int
    tensor: Tensor
    is_done: bool = False

    def wait(self) -> None:
        while not self.is_done:
            self.way.take_next(self.rank)
