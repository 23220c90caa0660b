"""Tensors from one process to another: sent, or on CPUs of one machine read. What they are is pipeline/transport.py's.

[Note: reading what is sent] The sender tells where a tensor lies and keeps it there; the receiver copies it when it is
waited for, in its own thread, and says so. Nothing is copied twice and no other thread takes part: of 512 KiB gloo's
way takes 202 µs and this 98, of a few bytes 79 and 23 (2 cores).
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from .agreement import gather_integers
from .exchange import Waitable
from .mesh import ParallelMesh
from .process_memory import Neighbours, find_neighbours
from .traffic import OneCollective


class Direct(Protocol):
    """A way for tensors between the ranks of a group.

    What one rank sends to another, that one receives in the same order. Everything raises RuntimeError where the other
    rank is lost.
    """

    def send(self, tensor: Tensor, rank: int) -> Waitable:
        """Begin to send a contiguous tensor, which must stay as it is until that was waited for."""
        ...

    def receive(self, tensor: Tensor, rank: int) -> Waitable:
        """Begin to fill a contiguous tensor with one of its size that a rank sends."""
        ...


def direct_ways(mesh: ParallelMesh, count: int) -> list[Direct]:
    """So many ways along the axis pp, of which none waits for what another one carries. Collective over the world."""
    group = mesh.group("pp")
    neighbours = find_neighbours(group) if mesh.device.type == "cpu" else None
    if not all(near for (near,) in gather_integers((int(neighbours is not None),))):
        return [_Sending(each) for each in mesh.pipeline_groups(count)]
    assert neighbours is not None
    return [_Reading(group, neighbours, number) for number in range(count)]


class _Sending:
    """By the group's own messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int) -> Waitable:
        """See `Direct`."""
        return self._group.send([tensor], rank, 0)

    def receive(self, tensor: Tensor, rank: int) -> Waitable:
        """See `Direct`."""
        return self._group.recv([tensor], rank, 0)


class _Reading:
    """See [Note: reading what is sent].

    Args:
        group: between whom.
        neighbours: its processes.
        number: what only this one of their ways has.
    """

    def __init__(self, group: dist.ProcessGroup, neighbours: Neighbours, number: int) -> None:
        self._group, self._neighbours = group, neighbours
        self._sent_tag, self._read_tag = 2 * number, 2 * number + 1
        self._sent: Counter[int] = Counter()  # by rank, as below
        self._read: Counter[int] = Counter()  # of what was sent, as far as this rank was told
        self._expected: dict[int, deque[_Receive]] = defaultdict(deque)

    def send(self, tensor: Tensor, rank: int) -> Waitable:
        """See `Direct`."""
        with OneCollective("send", tensor.nbytes, self._group):
            self._neighbours.messages.tell(rank, self._sent_tag, tensor.data_ptr(), tensor.nbytes)
        self._sent[rank] += 1
        return _Send(self, rank, self._sent[rank])

    def receive(self, tensor: Tensor, rank: int) -> Waitable:
        """See `Direct`."""
        with OneCollective("recv", tensor.nbytes, self._group):
            self._expected[rank].append(_Receive(self, rank, tensor))
        return self._expected[rank][-1]

    def wait_until_read(self, rank: int, number: int) -> None:
        """Wait until a rank has read so many of the tensors for it."""
        while self._read[rank] < number:
            self._neighbours.messages.hear(rank, self._read_tag)
            self._read[rank] += 1

    def take_next(self, rank: int) -> None:
        """Read the first tensor that is expected of a rank."""
        receive = self._expected[rank][0]
        address, nbytes = self._neighbours.messages.hear(rank, self._sent_tag)
        if nbytes != receive.tensor.nbytes:
            raise RuntimeError(f"it sends {nbytes} bytes where {receive.tensor.nbytes} are expected")
        try:
            self._neighbours.read(rank, address, receive.tensor)
        except ConnectionError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        self._neighbours.messages.tell(rank, self._read_tag)
        self._expected[rank].popleft().is_done = True


class _Send(NamedTuple):
    way: _Reading
    rank: int
    number: int

    def wait(self) -> None:
        self.way.wait_until_read(self.rank, self.number)


@dataclass(eq=False)
class _Receive:
    way: _Reading
    rank: int
    tensor: Tensor
    is_done: bool = False

    def wait(self) -> None:
        while not self.is_done:
            self.way.take_next(self.rank)
