"""Partition of flat buffers over the data axes: the owner of each slice, and the collectives between slices.

[Note: replication] ZeRO has one rule: a parameter is replicated over the data axes that none of its placements names.
Its gradient is averaged over these replicas, and its optimizer state is sharded over them. The replicas of a parameter
that no data axis shards are all ranks of "data"; those of one sharded over "wp" are the ranks with the same shard. Over
the sub-axis that a placement names, backward leaves the mean, summands of it (`PartialGrad`) or, over one of `SUMMED`,
the sum.

[Note: who reduces a parameter] Its gradient is summed over `ManagedParameter.sum_groups`, then averaged over the
`group` of the `Partition` that `sharded_over` selects. `ManagedParameter.of` derives both from the placements and from
ties between stages.
"""

from collections.abc import Callable, Iterator
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
from ..cluster.layout import LAYER_AXES, SUB_AXES, SUMMED
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import is_primary, num_summands, placements_of


@dataclass(frozen=True, kw_only=True)
class ManagedParameter:
    """A local parameter of the model, and how its gradient is reduced and counted.

    See [Note: who reduces a parameter].

    Args:
        name: its Hugging Face name, the same under every layout.
        parameter: the parameter object; it keeps its identity. With a `Shard` it is this rank's shard.
        sum_groups: groups over which its gradient is partial and is summed before any other reduction: ties across
            pipeline stages, replicas of key-value heads, norms inside a tensor-parallel region. All ranks of a group
            list the parameters of that group in the same order. All ranks with the parameter list its groups in the
            same order of axes.
        is_primary: True on exactly one of the ranks with the same shard along all axes but those of data: that rank
            counts the gradient in the norm, and may save the shard. Replicas along the data axis are not considered.
        stage: the only pipeline stage that uses it, None for several. A backward that computes gradients of some
            parameters of a stage computes all gradients of the stage. Buckets do not span stages.
        dtype: the format that it computes in; None is that of the run's precision.
    """

    name: str
    parameter: Parameter
    sum_groups: tuple[ProcessGroup, ...] = ()
    is_primary: bool = True
    stage: int | None = None
    dtype: torch.dtype | None = None

    @staticmethod
    def of(
        name: str,
        parameter: Parameter,
        *,
        mesh: ParallelMesh,
        tie_group: ProcessGroup | None = None,
        stage: int | None = None,
    ) -> "ManagedParameter":
        """Describe a parameter by its placements. Collective over the world where replicas of a shard form groups.

        Args:
            name, parameter, stage: see the class.
            mesh: the mesh with the axes of the placements.
            tie_group: the pipeline ranks that share the parameter; None if only this rank has it.

        Raises:
            ValueError: the parameter has no placement on a layer axis.
        """
        for axis in LAYER_AXES:
            if mesh.size(axis) > 1 and axis not in placements_of(parameter):
                raise ValueError(
                    f"{name} is neither sharded, partial nor replicated over the axis {axis!r}: let the policy add it "
                    "to the model in preprocess, or place it (echelon.cluster.placement.place)"
                )
        groups = (*_partial_groups(parameter, mesh), tie_group)
        is_first_of_tie = tie_group is None or tie_group.rank() == 0
        return ManagedParameter(
            name=name,
            parameter=parameter,
            sum_groups=tuple(group for group in groups if group is not None),
            is_primary=is_first_of_tie and is_primary(parameter, mesh.rank),
            stage=stage,
        )

    @property
    def needs_sum(self) -> bool:
        """Return True if its gradient is summed over other groups before it is averaged over the data axis."""
        return any(group.size() > 1 for group in self.sum_groups)

    @property
    def sharded_over(self) -> str | None:
        """Return the sub-axis of the data axis that a placement names; see [Note: replication]."""
        placed = placements_of(self.parameter)
        axes = [axis for axis in SUB_AXES if axis in placed and placed[axis].size > 1]
        assert len(axes) < 2, f"{self.name} is sharded over {axes}, whose ranks are the same neighbours"
        return axes[0] if axes else None


class Chain:
    """Two collectives in sequence, the second on the result of the first.

    With a stream that waits for the first, the second is enqueued at once, and neither the host nor the computation
    waits. Otherwise the second begins in `wait`, once.

    Args:
        first: the first collective, in flight.
        begin: begins the second, once the first is complete.
        waiting_stream: a context in which a CUDA stream waits for the first; None where the host has to wait.
    """

    def __init__(
        self, first: Handle, begin: Callable[[], Handle], waiting_stream: AbstractContextManager[Any] | None
    ) -> None:
        self._first, self._begin = first, begin
        self._second: Handle | None = None
        if waiting_stream is not None:
            with waiting_stream:
                self._second = self._begin_second()

    def wait(self) -> None:
        """Wait for both collectives: on CUDA the current stream waits, else the host."""
        if self._second is None:
            self._second = self._begin_second()
        self._second.wait()

    def _begin_second(self) -> Handle:
        self._first.wait()
        return self._begin()


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Division of a flat buffer into equal slices, and the collectives that average gradients and gather parameters.

    There is one slice per rank of a group (ZeRO), or a single one that every rank owns. `average_` is a reduce-scatter
    or an all-reduce over the replicas, `gather_` an all-gather where there are several slices.

    Args:
        group: the replicas, whose gradients are averaged.
        slices: the replicas over which the buffer is sharded (ZeRO); None if each owns all of it (data parallelism).
        divisor: the number of ranks whose gradients the sum over the group has.
        slice_owners: the replicas that own the same slice as this rank, as many for each slice; None if only this rank.
        waiting_stream: the stream on which the sum over `slice_owners` waits for the one over `slices`; None where the
            host waits.
        stride: the distance between neighboring replicas on the data axis.
    """

    group: ProcessGroup
    slices: ProcessGroup | None
    divisor: int
    slice_owners: ProcessGroup | None
    waiting_stream: AbstractContextManager[Any] | None = None
    stride: int = 1

    @staticmethod
    def of(mesh: ParallelMesh, zero_size: int, *, sharded_over: str | None = None) -> "Partition":
        """Make a partition over the replicas, in groups of `zero_size` neighboring ranks.

        Collective over the world.

        Args:
            mesh: the ranks.
            zero_size: the number of neighbors on the data axis over which buffers are sharded, a divisor; -1 or 0 is
                all. For a parameter that is sharded over some of them, only its replicas own slices.
            sharded_over: a sub-axis of the data axis over which a parameter is not replicated.
        """
        stride = 1 if sharded_over is None else mesh.size(sharded_over)
        data_size = mesh.size("data")
        num_replicas = data_size // stride
        num_slices = num_replicas
        if zero_size not in (-1, 0):
            # Of `zero_size` neighbors one in `stride` is a replica. That number may not divide all replicas.
            num_slices = gcd(max(1, zero_size // stride), num_replicas)
        replicas = [range(first, data_size, stride) for first in range(stride)]
        neighbors = [
            ranks[start : start + num_slices]
            for ranks in replicas
            for start in range(0, num_replicas, num_slices)
        ]
        owners_of_a_slice = [ranks[index::num_slices] for ranks in replicas for index in range(num_slices)]
        return Partition(
            group=_group(mesh, replicas),
            slices=_group(mesh, neighbors) if num_slices > 1 else None,
            divisor=data_size if sharded_over in SUMMED else num_replicas,
            slice_owners=_group(mesh, owners_of_a_slice) if num_slices < num_replicas else None,
            waiting_stream=side_stream(mesh.device) if 1 < num_slices < num_replicas else None,
            stride=stride,
        )

    @staticmethod
    def all_of(mesh: ParallelMesh, zero_size: int) -> dict[str | None, "Partition"]:
        """Make a partition for each sub-axis over which parameters may be sharded; None: for those over none.

        Collective over the world.
        """
        axes = [axis for axis in SUB_AXES if mesh.size(axis) > 1]
        return {axis: Partition.of(mesh, zero_size, sharded_over=axis) for axis in (None, *axes)}

    @property
    def num_slices(self) -> int:
        """The number of different slices."""
        return 1 if self.slices is None else self.slices.size()

    @property
    def index(self) -> int:
        """Index of this rank's slice."""
        return 0 if self.slices is None else self.slices.rank()

    def slice_index_of(self, coordinate: int) -> int:
        """Index of the slice of the rank with this coordinate on the data axis."""
        return coordinate // self.stride % self.num_slices

    @property
    def span(self) -> int:
        """The number of neighbors on the data axis that have all slices, and all shards over a sub-axis, together."""
        return self.num_slices * self.stride

    @property
    def is_counted(self) -> bool:
        """Return True if this rank, among the owners of its slice, counts it in a norm."""
        return self.slice_owners is None or self.slice_owners.rank() == 0

    @property
    def needs_all_ranks_to_wait(self) -> bool:
        """Return True if an average in flight completes only once every rank waits: its second sum begins then."""
        return self.slices is not None and self.slice_owners is not None and self.waiting_stream is None

    def local_slice(self, flat: Tensor) -> Tensor:
        """Return the view of this rank's slice of an unsharded buffer."""
        return flat if self.slices is None else flat.chunk(self.slices.size())[self.slices.rank()]

    def average_(self, gradients: Tensor, wire_dtype: torch.dtype = torch.float32) -> InFlight[None] | None:
        """Begin to average an unsharded float32 buffer over the group, into this rank's slice.

        One all-reduce, or one reduce-scatter, which leaves the other slices undefined. Where the slice has several
        owners an all-reduce of it over them follows, see `Chain`. Returns None where there is nothing to wait for.

        A mean is a sum and a division, over gloo as over NCCL. In float32 the division comes afterwards, on the shorter
        slice. A 16-bit sum could overflow, so there the addends are divided when they are rounded to `wire_dtype`.
        """
        divisor = self.divisor
        if self.group.size() == 1:
            if divisor > 1:
                gradients.div_(divisor)
            return None
        is_rounded, send_buffer = wire_dtype != torch.float32, gradients
        if is_rounded:
            send_buffer = torch.div(gradients, divisor, out=torch.empty_like(gradients, dtype=wire_dtype))
        mean = self.local_slice(gradients)

        def finish(total: Tensor) -> None:
            if is_rounded:
                mean.copy_(total)
            else:
                mean.div_(divisor)

        total = self.local_slice(send_buffer)
        if self.slices is None:
            return InFlight(dist.all_reduce(total, group=self.group, async_op=True), total, finish)
        work: Handle = begin_reduce_scatter(total, send_buffer, self.slices)
        if self.slice_owners is not None:
            begin_second = partial(dist.all_reduce, total, group=self.slice_owners, async_op=True)
            work = Chain(work, begin_second, self.waiting_stream)
        return InFlight(work, total, finish)

    def gather_(self, flat: Tensor) -> Handle | None:
        """Begin to fill an unsharded buffer, in place, from the ranks' slices. One all-gather if there are several.

        Wait for the handle before writing to the buffer.
        """
        return None if self.slices is None else begin_all_gather(flat, self.local_slice(flat), self.slices)

    def gathered(self, slice_: Tensor) -> Tensor:
        """Return a new unsharded buffer of the ranks' slices. One all-gather if there are several."""
        unsharded = slice_.new_empty(slice_.numel() * self.num_slices)
        self.local_slice(unsharded).copy_(slice_)
        if (gathering := self.gather_(unsharded)) is not None:
            gathering.wait()
        return unsharded

    def broadcast_(self, flat: Tensor) -> None:
        """Broadcast the buffer of the group's first rank."""
        if self.group.size() > 1:
            dist.broadcast(flat, group_src=0, group=self.group)


def default_bucket_size(device: torch.device, num_replicas: int) -> int:
    """Return the default number of elements per bucket.

    On CUDA a bucket costs a few launches whatever its size, and links need long messages, of which each of n ranks
    sends 1/n at a time: 40M or n M, as in Megatron-LM. On CPUs it is 12M, as in ColossalAI.
    """
    return bucket_size_on_gpus(num_replicas) if is_cuda(device) else 12 * 2**20


def bucket_size_on_gpus(num_replicas: int) -> int:
    """Return `default_bucket_size` for a GPU, also on a machine without one."""
    return max(40, num_replicas) * 2**20


def _partial_groups(parameter: Parameter, mesh: ParallelMesh) -> Iterator[ProcessGroup]:
    """Yield the groups over which the gradient of a parameter is summed: neighbors on an axis where it is partial.

    Collective over the world where a group is new.
    """
    for axis, placement in placements_of(parameter).items():
        if (num_ranks := num_summands(parameter, axis)) > 1:
            firsts = range(0, placement.size, num_ranks)
            yield _group(mesh, [range(first, first + num_ranks) for first in firsts], axis)


def _group(mesh: ParallelMesh, subsets: list[range], axis: str = "data") -> ProcessGroup:
    """Return the group of the subset of an axis that has this rank. Collective over the world."""
    group = mesh.subgroup(axis, subsets)
    assert group is not None  # every rank is in a subset
    return group
