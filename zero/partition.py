"""How the ranks of the data axis share out a flat buffer, and what they exchange for it."""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.collectives import all_gather_single, reduce_scatter_single
from ..cluster.mesh import ParallelMesh


class Waitable(Protocol):
    """Communication under way."""

    def wait(self) -> Any:
        """Return, or on CUDA let the current stream go on, when it is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Equal slices of every buffer, one per rank of a group, or a single slice that every rank holds.

    Args:
        group: the ranks whose gradients are averaged.
        slices: those of them that own one slice each (ZeRO); None where each owns all (plain data parallelism).
        copies: the ranks that own this rank's slice, where `slices` is a part of the group: as many from each
            part. None where each slice has one owner.
    """

    group: dist.ProcessGroup
    slices: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None

    @staticmethod
    def of(mesh: ParallelMesh, axis: str, num_slices: int) -> "Partition":
        """The ranks along an axis of the mesh in parts of `num_slices` neighbours, each sharing out all.

        -1 or 0 neighbours are the whole axis. Collective over the world where there are several parts.
        """
        group, size = mesh.group(axis), mesh.size(axis)
        num_slices = size if num_slices in (-1, 0) else num_slices
        if num_slices == 1:
            return Partition(group=group)
        if num_slices == size:
            return Partition(group=group, slices=group)
        slices = mesh.subgroup(
            axis, [range(first, first + num_slices) for first in range(0, size, num_slices)]
        )
        copies = mesh.subgroup(axis, [range(index, size, num_slices) for index in range(num_slices)])
        return Partition(group=group, slices=slices, copies=copies)

    @property
    def num_slices(self) -> int:
        """The number of different slices."""
        return 1 if self.slices is None else self.slices.size()

    @property
    def index(self) -> int:
        """Which of the slices this rank owns."""
        return 0 if self.slices is None else self.slices.rank()

    @property
    def counts(self) -> bool:
        """Whether this rank is the one, of those that own its slice, that counts it in a norm."""
        owners = self.group if self.slices is None else self.copies
        return owners is None or owners.rank() == 0

    def own(self, flat: Tensor) -> Tensor:
        """The view of a whole buffer that this rank owns."""
        length = flat.numel() // self.num_slices
        return flat.narrow(0, self.index * length, length)

    def average_(self, gradients: Tensor) -> Waitable | None:
        """Begin to bring the mean over the group into this rank's slice of a whole buffer, in place.

        One all-reduce, or one reduce-scatter that leaves the other slices as they were, and where the slice has
        several owners an all-reduce of it over them, which begins when it is waited for. Returns what to wait
        for, None where there is nothing.
        """
        if self.group.size() == 1:
            return None
        average = dist.ReduceOp.AVG
        if self.slices is None:
            return dist.all_reduce(gradients, op=average, group=self.group, async_op=True)
        own = self.own(gradients)
        work = reduce_scatter_single(own, gradients, op=average, group=self.slices, async_op=True)
        return work if self.copies is None else _ThenAverage(work, own, self.copies)

    def gather_(self, flat: Tensor) -> None:
        """Fill a whole buffer, in place, from the slices that its ranks own. One all-gather if sliced."""
        if self.slices is not None:
            all_gather_single(flat, self.own(flat), group=self.slices)

    def gathered(self, slice_: Tensor) -> Tensor:
        """The whole buffer, new, whose slices the ranks hold apart. One all-gather if sliced."""
        if self.slices is None:
            return slice_.clone()
        whole = slice_.new_empty(slice_.numel() * self.num_slices)
        all_gather_single(whole, slice_, group=self.slices)
        return whole

    def broadcast_(self, flat: Tensor) -> None:
        """Give every rank the buffer of the group's first."""
        if self.group.size() > 1:
            dist.broadcast(flat, group_src=0, group=self.group)

    def maximum_(self, flags: Tensor) -> None:
        """The largest of each entry over the group, in place. One all-reduce."""
        if self.group.size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)


class _ThenAverage(NamedTuple):
    """A reduce-scatter, and the mean of its result over the owners of a slice."""

    first: Waitable
    own: Tensor
    owners: dist.ProcessGroup

    def wait(self) -> None:
        """Have both."""
        self.first.wait()
        dist.all_reduce(self.own, op=dist.ReduceOp.AVG, group=self.owners)


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
