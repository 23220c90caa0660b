"""How the ranks of the data axis share out a flat buffer, and what they exchange for it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.exchange import Exchange, Waitable, exchange_of
from ..cluster.mesh import ParallelMesh
from ..cluster.small_numbers import all_reduce_


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Equal slices of every buffer, one per rank of a group, or a single slice that every rank holds.

    Args:
        group: the ranks whose gradients are averaged.
        slices: those of them that own one slice each (ZeRO); None where each owns all (plain data parallelism).
        copies: those of them that own this rank's slice, as many in each part of the group; None where nobody
            else does.
    """

    group: dist.ProcessGroup
    slices: Exchange | None
    copies: Exchange | None

    @staticmethod
    def of(mesh: ParallelMesh, axis: str, num_slices: int, *, stride: int = 1) -> "Partition":
        """The ranks along an axis of the mesh in parts of `num_slices` neighbours, each sharing out all.

        -1 or 0 neighbours are the whole axis. Collective over the world.

        Args:
            mesh, axis: the ranks.
            num_slices: neighbours of a part, on the whole axis.
            stride: only every so many ranks hold the same, and average and share it out among themselves; the ranks
                of a part are then those of them that lie within `num_slices` neighbours of the axis.
        """
        size = mesh.size(axis) // stride
        num_slices = size if num_slices in (-1, 0) else gcd(max(1, num_slices // stride), size)
        lines = [range(first, mesh.size(axis), stride) for first in range(stride)]
        along = [line[start : start + num_slices] for line in lines for start in range(0, size, num_slices)]
        across = [line[index::num_slices] for line in lines for index in range(num_slices)]
        return Partition(
            group=_group(mesh, axis, lines),
            slices=_exchange(mesh, axis, along) if num_slices > 1 else None,
            copies=_exchange(mesh, axis, across) if num_slices < size else None,
        )

    @property
    def num_slices(self) -> int:
        """The number of different slices."""
        return 1 if self.slices is None else self.slices.group.size()

    @property
    def index(self) -> int:
        """Which of the slices this rank owns."""
        return 0 if self.slices is None else self.slices.group.rank()

    @property
    def counts(self) -> bool:
        """Whether this rank is the one, of those that own its slice, that counts it in a norm."""
        return self.copies is None or self.copies.group.rank() == 0

    @property
    def exchanges(self) -> set[Exchange]:
        """What it exchanges by; two partitions may have one in common."""
        return {exchange for exchange in (self.slices, self.copies) if exchange is not None}

    @property
    def ends_together(self) -> bool:
        """Whether an average that was begun ends only if every rank waits for it."""
        return self.copies is not None or (self.slices is not None and self.slices.ends_together)

    def own(self, flat: Tensor) -> Tensor:
        """The view of a whole buffer that this rank owns."""
        return flat if self.slices is None else self.slices.own(flat)

    def average_(self, gradients: Tensor) -> Waitable | None:
        """Begin to bring the mean over the group into this rank's slice of a whole buffer, in place.

        One all-reduce, or one reduce-scatter that leaves the other slices as they were, and where the slice has
        several owners an all-reduce of it over them, which begins when it is waited for. Returns what to wait
        for, None where there is nothing.
        """
        if self.slices is None:
            return None if self.copies is None else self.copies.all_reduce_(gradients)
        work = self.slices.reduce_scatter_(gradients)
        return work if self.copies is None else _ThenAverage(work, self.own(gradients), self.copies)

    def gather_(self, flat: Tensor) -> Waitable | None:
        """Begin to fill a whole buffer, in place, from the slices that its ranks own. One all-gather if sliced."""
        return None if self.slices is None else self.slices.all_gather_(flat)

    def gather_later_(self, flat: Tensor) -> Waitable:
        """`gather_` where there are slices, for which single ranks may wait at any time before `release`."""
        assert self.slices is not None
        return self.slices.all_gather_later_(flat)

    def release(self) -> None:
        """Let the other ranks have what `gather_later_` began, before the next. Every rank calls it."""
        if self.slices is not None:
            self.slices.release()

    def gathered(self, slice_: Tensor) -> Tensor:
        """The whole buffer, new, whose slices the ranks hold apart. One all-gather if sliced."""
        whole = slice_.new_empty(slice_.numel() * self.num_slices)
        self.own(whole).copy_(slice_)
        if (gathering := self.gather_(whole)) is not None:
            gathering.wait()
        return whole

    def broadcast_(self, flat: Tensor) -> None:
        """Give every rank the buffer of the group's first."""
        if self.group.size() > 1:
            dist.broadcast(flat, group_src=0, group=self.group)

    def maximum_(self, flags: Tensor) -> None:
        """The largest of each entry over the group, in place. One all-reduce."""
        if self.group.size() > 1:
            all_reduce_(flags, dist.ReduceOp.MAX, self.group)


def partitions_by_stride(
    mesh: ParallelMesh, axis: str, num_slices: int, weight_size: int
) -> dict[int, Partition]:
    """The partition of an axis for what all its ranks hold, and for what every `weight_size`-th does.

    Collective over the world.
    """
    return {
        stride: Partition.of(mesh, axis, num_slices, stride=stride) for stride in sorted({1, weight_size})
    }


def arriving_bytes(partitions: Iterable[Partition]) -> int:
    """The memory that is kept for what arrives from other ranks."""
    exchanges = {exchange for partition in partitions for exchange in partition.exchanges}
    return sum(exchange.nbytes for exchange in exchanges)


def _group(mesh: ParallelMesh, axis: str, parts: list[range]) -> dist.ProcessGroup:
    """This rank's part. Collective over the world."""
    group = mesh.group(axis) if len(parts) == 1 else mesh.subgroup(axis, parts)
    assert group is not None  # every rank is in a part
    return group


def _exchange(mesh: ParallelMesh, axis: str, parts: list[range]) -> Exchange:
    """Among this rank's part. Collective over the world."""
    return exchange_of(mesh, _group(mesh, axis, parts))


class _ThenAverage(NamedTuple):
    """A reduce-scatter, and the mean of its result over the owners of a slice."""

    first: Waitable
    own: Tensor
    owners: Exchange

    def wait(self) -> None:
        """Have both."""
        self.first.wait()
        self.owners.all_reduce_(self.own).wait()


def require_agreement(lines: list[str], *, group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Raise on every rank of the group unless all have the same lines. One all-reduce of two numbers.

    Raises:
        ValueError: the ranks differ; it names the first line that does.
    """
    if group.size() == 1:
        return
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = extremes.tolist()
    if largest == -negated_smallest:
        return
    every: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(every, lines, group=group)
    raise ValueError(
        f"{what} differ between ranks {_first_difference(every, dist.get_process_group_ranks(group))}"
    )


def _first_difference(every: list[list[str]], ranks: list[int]) -> str:
    other = next(index for index, lines in enumerate(every) if lines != every[0])
    mine, theirs = every[0], every[other]
    length = max(len(mine), len(theirs))
    mine, theirs = (
        [*mine, *["nothing"] * (length - len(mine))],
        [*theirs, *["nothing"] * (length - len(theirs))],
    )
    at = next(index for index in range(length) if mine[index] != theirs[index])
    return (
        f"{ranks[0]} and {ranks[other]}: number {at} is {mine[at]} on the one and {theirs[at]} on the other"
    )
