"""A few numbers that all ranks of a group tell each other in every step. What follows from them is the callers'.

[Note: small collectives] Where a step of four ranks on two cores has 490 ms, one of gloo's small collectives in it took
4 to 7 ms, since many threads have to be woken up one after the other, and the same by messages.py took 0.1.
"""

from collections.abc import Callable, Sequence
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import begin_gathering_integers, tagged, untagged
from .launch import default_device
from .messages import MOST_NUMBERS
from .process_memory import Neighbours, find_neighbours
from .traffic import OneCollective

Rows = list[tuple[int, ...]]  # by rank


def begin_gathering(
    values: Sequence[int], group: dist.ProcessGroup | None = None, call: str | None = None
) -> Callable[[], Rows]:
    """`begin_gathering_integers` by the quicker way, for the thread that trains.

    Collective in itself the first time.

    Args:
        values: 64-bit integers, equally many on each rank.
        group: None is the world.
        call: in which it is done, as an error shall say it where ranks are in different ones. None is the watched one.

    Returns:
        What waits for the other ranks and gives every rank's integers, in the order of ranks; called once.
    """
    group = group or _world()
    lines = _lines_of(group)
    if lines is None or len(values) + 2 > MOST_NUMBERS:
        return begin_gathering_integers(values, group, call)
    with OneCollective("all_gather", 8 * len(tagged(values)) * group.size(), group):
        return lines.begin(values, call)


def all_reduce_(
    x: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The sum or the maximum of a few numbers over all ranks, equal to the bit on all; in place.

    Collective in itself the first time. Where ranks tell each other, it is added up in float64.

    Args:
        x: of a floating format.
        operation: `SUM` or `MAX`.
        group: None is the world.
    """
    group = group or _world()
    lines = _lines_of(group) if x.device.type == "cpu" else None
    if lines is None or x.numel() + 2 > MOST_NUMBERS:
        dist.all_reduce(x, op=operation, group=group)
        return x
    with OneCollective("all_reduce", x.nbytes, group):
        every = _doubles(lines.begin(_bits(x))())
    whole = every.sum(0) if operation == dist.ReduceOp.SUM else every.amax(0)
    return x.copy_(whole.view(x.shape))


class _Lines:
    """Those of a group whose processes are neighbours."""

    def __init__(self, group: dist.ProcessGroup, neighbours: Neighbours) -> None:
        self._rank, self._ranks, self._messages = group.rank(), range(group.size()), neighbours.messages
        self._members = dist.get_process_group_ranks(group)
        self._tags = count()  # one for each collective

    def begin(self, values: Sequence[int], call: str | None = None) -> Callable[[], Rows]:
        tag, own = next(self._tags), tagged(values, call)
        self._tell(tag, own)
        return lambda: untagged(
            [own if rank == self._rank else tuple(self._messages.hear(rank, tag)) for rank in self._ranks],
            self._members,
        )

    def _tell(self, tag: int, values: Sequence[int]) -> None:
        for rank in self._ranks:
            if rank != self._rank:
                self._messages.tell(rank, tag, *values)


def _bits(x: Tensor) -> list[int]:
    """Floating numbers as what goes in a message."""
    bits: list[int] = x.double().view(-1).view(torch.int64).tolist()
    return bits


def _doubles(bits: Sequence[int] | Rows) -> Tensor:
    """What `_bits` was made of, of one rank or by rank."""
    return torch.tensor(bits, dtype=torch.int64).view(torch.float64)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # there are processes that train
    return world


def _lines_of(group: dist.ProcessGroup) -> _Lines | None:
    """None where the processes are no neighbours, or train on devices. Collective over the group the first time."""
    if group not in _LINES:
        neighbours = find_neighbours(group) if default_device().type == "cpu" else None
        _LINES[group] = None if neighbours is None else _Lines(group, neighbours)
    return _LINES[group]


# By group, as long as that lives; none refers back to its group.
_LINES: WeakKeyDictionary[dist.ProcessGroup, _Lines | None] = WeakKeyDictionary()
