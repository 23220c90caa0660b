"""Partition of flat buffers over the data axes: who owns which slice, and how gradients and parameters get there.

[Note: replication] ZeRO has one rule: a parameter is replicated over the data axes that its placement does not name.
Its gradient is averaged over these replicas, and they share its optimizer state. A parameter that no data axis shards
has the whole "data" axis for replicas; one that is sharded over "wp" has the ranks with the same shard.

[Note: who reduces a parameter] Its gradient is summed over `ManagedParameter.sum_groups`, then averaged over the
`group` of the `Partition` that `sharded_over` chooses. `ManagedParameter.of` reads all of it from the placement and
from ties between stages.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..cluster.collectives import Handle, InFlight, begin_all_gather, begin_reduce_scatter
from ..cluster.device import is_cuda, side_stream
from ..cluster.mesh import PARTS_OF_DATA, ParallelMesh, divisors
from ..cluster.placement import Shard, is_primary, num_parts, placement_of


@dataclass(frozen=True, kw_only=True)
class ManagedParameter:
    """A parameter of this rank's part of the model, and how its gradient is reduced and counted.

    See [Note: who reduces a parameter].

    Args:
        name: its Hugging Face name, the same under every layout.
        parameter: the parameter object; it keeps its identity. With a placement it is this rank's shard.
        sum_groups: its gradient is partial over each of these groups and is summed there before anything
            else: ties across pipeline stages, replicas of key-value heads, norms inside a tensor-parallel
            region. All ranks of a group list the parameters of that group in the same order, and all ranks
            that hold the parameter list its groups in the same order of axes.
        is_primary: True on one of the ranks that hold the same shard along the tensor and pipeline axes: it counts the
            gradient in the norm, and may save the shard. Replicas along the data axis are the optimizer's own matter.
        stage: the pipeline stage that uses it alone, None for several: a backward that gives gradients to some
            parameters of a stage gives them to all of it. Buckets do not span stages.
    """

    name: str
    parameter: Parameter
    sum_groups: tuple[ProcessGroup, ...] = ()
    is_primary: bool = True
    stage: int | None = None

    @staticmethod
    def of(
        name: str,
        parameter: Parameter,
        *,
        mesh: ParallelMesh,
        tie_group: ProcessGroup | None = None,
        stage: int | None = None,
    ) -> "ManagedParameter":
        """Describe a parameter by its placement. Collective over the world where replicas of a shard form groups.

        Args:
            name, parameter, stage: as of the class.
            mesh: whose axes the placement names.
            tie_group: the pipeline ranks that share the parameter; None where only this one has it.
        """
        groups = (_partial_group(parameter, mesh), tie_group)
        is_first_of_tie = tie_group is None or tie_group.rank() == 0
        return ManagedParameter(
            name=name,
            parameter=parameter,
            sum_groups=tuple(group for group in groups if group is not None),
            is_primary=is_first_of_tie and is_primary(parameter, mesh.rank("tp"), axis="tp"),
            stage=stage,
        )

    @property
    def needs_sum(self) -> bool:
        """Return True if its gradient is summed over other groups before it is averaged over the data axis."""
        return any(group.size() > 1 for group in self.sum_groups)

    @property
    def sharded_over(self) -> str | None:
        """The part of the data axis that its placement names. Its gradient comes as the mean over it already."""
        placement = placement_of(self.parameter)
        return placement.axis if isinstance(placement, Shard) and placement.axis in PARTS_OF_DATA else None


class Chain:
    """Communication that follows another, of which it takes the result.

    Where a stream can wait for the first, the second begins at once behind it, and neither the host nor the computation
    stops for it. Else it begins in `wait`, once.

    Args:
        first: in flight.
        begin: begins the second.
        beside: a stream that waits for the first; None where the host has to.
    """

    def __init__(
        self, first: Handle, begin: Callable[[], Handle], beside: AbstractContextManager[Any] | None
    ) -> None:
        self._first, self._begin = first, begin
        self._second: Handle | None = None
        if beside is not None:
            with beside:
                self._second = self._follow()

    def wait(self) -> None:
        """Return, or on CUDA let the current stream go on, when both are done."""
        if self._second is None:
            self._second = self._follow()
        self._second.wait()

    def _follow(self) -> Handle:
        self._first.wait()
        return self._begin()


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Division of a buffer into equal slices, and the collectives that bring gradients and parameters there and back.

    One slice per rank of a group (ZeRO), or a single one that every rank owns. `average_` is a reduce-scatter or an
    all-reduce over the replicas, `gather_` an all-gather where there are several slices.

    Args:
        group: the replicas, whose gradients are averaged.
        slices: those of them that own one slice each (ZeRO); None where each owns all (plain data parallelism).
        copies: those of them that own this rank's slice, as many in each part of the group; None where nobody
            else does.
        beside: the stream on which the sum over `copies` waits for the one over `slices`; None where the host does.
    """

    group: ProcessGroup
    slices: ProcessGroup | None
    copies: ProcessGroup | None
    beside: AbstractContextManager[Any] | None = None

    @staticmethod
    def of(mesh: ParallelMesh, zero_size: int, *, sharded_over: str | None = None) -> "Partition":
        """Partition over the replicas, by neighborhoods of `zero_size` ranks.

        Collective over the world.

        Args:
            mesh: the ranks.
            zero_size: neighbors on the data axis over which slices are dealt out; -1 or 0 are the whole axis. Of a
                parameter that is sharded over some of them, only those that are replicas own one.
            sharded_over: a part of the axis, over which a parameter is not replicated.
        """
        apart = 1 if sharded_over is None else mesh.size(sharded_over)  # the next replica on the axis
        whole = mesh.size("data")
        size = whole // apart
        num_slices = size if zero_size in (-1, 0) else gcd(max(1, zero_size // apart), size)
        replicas = [range(first, whole, apart) for first in range(apart)]
        along = [each[at : at + num_slices] for each in replicas for at in range(0, size, num_slices)]
        across = [each[index::num_slices] for each in replicas for index in range(num_slices)]
        return Partition(
            group=_group(mesh, replicas),
            slices=_group(mesh, along) if num_slices > 1 else None,
            copies=_group(mesh, across) if num_slices < size else None,
            beside=side_stream(mesh.device) if 1 < num_slices < size else None,
        )

    @staticmethod
    def all_of(mesh: ParallelMesh, zero_size: int) -> dict[str | None, "Partition"]:
        """Partitions by the part of the data axis that parameters are sharded over. Collective over the world."""
        parts = [part for part in PARTS_OF_DATA if mesh.size(part) > 1]
        return {each: Partition.of(mesh, zero_size, sharded_over=each) for each in (None, *parts)}

    @property
    def num_slices(self) -> int:
        """The number of different slices."""
        return 1 if self.slices is None else self.slices.size()

    @property
    def index(self) -> int:
        """Index of this rank's slice."""
        return 0 if self.slices is None else self.slices.rank()

    @property
    def is_counted(self) -> bool:
        """Return True if this rank is the one, of those that own its slice, that counts it in a norm."""
        return self.copies is None or self.copies.rank() == 0

    @property
    def ends_together(self) -> bool:
        """Return True if an average that was begun ends only if every rank waits for it."""
        return self.slices is not None and self.copies is not None and self.beside is None

    def own(self, flat: Tensor) -> Tensor:
        """The view of a whole buffer that this rank owns."""
        return flat if self.slices is None else flat.chunk(self.slices.size())[self.slices.rank()]

    def average_(self, gradients: Tensor, wire_dtype: torch.dtype = torch.float32) -> InFlight[None] | None:
        """Begin to bring the mean over the group into this rank's slice of a whole float32 buffer.

        One all-reduce, or one reduce-scatter, after which the other slices are of no use. Where the slice has
        several owners an all-reduce of it over them follows, see `Chain`. None where there is nothing to wait for.

        A mean is a sum that is divided, over gloo as over NCCL: in float32 afterwards, since a slice is shorter than
        what was summed up. In 16 bits the sum may be too large, so what travels is divided as it is rounded, at once.
        """
        if (size := self.group.size()) == 1:
            return None
        is_rounded, in_transit = wire_dtype != torch.float32, gradients
        if is_rounded:
            in_transit = torch.div(gradients, size, out=torch.empty_like(gradients, dtype=wire_dtype))
        own = self.own(gradients)

        def finish(total: Tensor) -> None:
            if is_rounded:
                own.copy_(total)
            else:
                own.div_(size)

        total = self.own(in_transit)
        if self.slices is None:
            return InFlight(dist.all_reduce(total, group=self.group, async_op=True), total, finish)
        work: Handle = begin_reduce_scatter(total, in_transit, self.slices)
        if self.copies is not None:
            work = Chain(work, partial(dist.all_reduce, total, group=self.copies, async_op=True), self.beside)
        return InFlight(work, total, finish)

    def gather_(self, flat: Tensor) -> Handle | None:
        """Begin to fill a whole buffer, in place, from the slices that its ranks own. One all-gather if sliced.

        Each rank waits for it before it writes to the buffer.
        """
        return None if self.slices is None else begin_all_gather(flat, self.own(flat), self.slices)

    def gathered(self, slice_: Tensor) -> Tensor:
        """A new whole buffer of the slices that the ranks own. One all-gather if sliced."""
        whole = slice_.new_empty(slice_.numel() * self.num_slices)
        self.own(whole).copy_(slice_)
        if (gathering := self.gather_(whole)) is not None:
            gathering.wait()
        return whole

    def broadcast_(self, flat: Tensor) -> None:
        """Give every rank the buffer of the group's first."""
        if self.group.size() > 1:
            dist.broadcast(flat, group_src=0, group=self.group)


def default_bucket_size(device: torch.device, num_replicas: int) -> int:
    """Elements that are communicated at once where nothing is said.

    On CUDA a bucket costs a few launches whatever its size, and links need long messages, of which each of n ranks
    sends 1/n at a time: 40M or n M, as in Megatron-LM. On CPUs it is 12M, as in ColossalAI.
    """
    return (max(40, num_replicas) if is_cuda(device) else 12) * 2**20


def zero_size_errors(zero_size: int, data_size: int) -> list[str]:
    """All that is wrong with sharding over this many of so many data-parallel ranks."""
    if zero_size in (-1, 0) or (zero_size > 0 and data_size % zero_size == 0):
        return []
    return [
        f"zero_size={zero_size} must divide the {data_size} data-parallel ranks: use one of "
        f"{', '.join(map(str, divisors(data_size)))}, or -1 for all of them"
    ]


def _partial_group(parameter: Parameter, mesh: ParallelMesh) -> ProcessGroup | None:
    """The ranks of the placement's axis that each have a part of the gradient; None where it is whole."""
    placement, size = placement_of(parameter), num_parts(parameter)
    if placement is None or size == 1:
        return None
    if size == placement.size:
        return mesh.group(placement.axis)
    parts = [range(first, first + size) for first in range(0, placement.size, size)]
    return mesh.subgroup(placement.axis, parts)


def _group(mesh: ParallelMesh, parts: list[range]) -> ProcessGroup:
    """This rank's part of the data axis. Collective over the world."""
    group = mesh.group("data") if len(parts) == 1 else mesh.subgroup("data", parts)
    assert group is not None  # every rank is in a part
    return group
