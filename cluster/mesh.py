"""The mesh of ranks, and the process groups of its axes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .device import backend_of, default_device
from .failures import start_watch
from .heartbeats import default_timeout
from .launch import wait_until_all_have_connected
from .layout import AXES, JOINED, SUB_AXES, MeshLayout

_PATIENCE = timedelta(hours=6)


@dataclass(frozen=True, kw_only=True)
class GroupUse:
    """The use of a kind of process group, from which NCCL's options follow; other backends have no options.

    Attributes:
        on_cpus: the group also exchanges integers between CPUs. If False it has no gloo backend with its connections
            and threads.
        is_urgent: computation waits for its kernels at once, so they get a high priority.
        max_ctas: maximum number of thread blocks of a kernel; None leaves it to NCCL.
    """

    on_cpus: bool = False
    is_urgent: bool = False
    max_ctas: int | None = None


# [Note: groups of NCCL] Up to four prefetched receives occupy the GPU until their senders start. Without a limit they
# would keep all multiprocessors that NCCL gives them from computing.
CHANNEL, SUBGROUP = "channel", "subgroup"
GROUPS = {
    "tp": GroupUse(on_cpus=True, is_urgent=True),
    "sp": GroupUse(on_cpus=True, is_urgent=True),
    "pp": GroupUse(on_cpus=True),
    "dp": GroupUse(on_cpus=True),
    "data": GroupUse(on_cpus=True),
    "ep": GroupUse(is_urgent=True),
    CHANNEL: GroupUse(is_urgent=True, max_ctas=4),  # between the stages of a pipeline
    SUBGROUP: GroupUse(),  # of an axis: rings, replicas of a weight
}


def nccl_options(use: GroupUse, device_type: str) -> tuple[str | None, Any] | None:
    """Backend and options of a new group, for torch; None if NCCL is not the backend of this device type."""
    if backend_of(device_type) != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=use.is_urgent)
    options._timeout = default_timeout()  # private torch API; torch warns if it is not the group's timeout
    if use.max_ctas is not None:
        options.config.min_ctas, options.config.max_ctas = 1, use.max_ctas
    backend = None if use.on_cpus else "nccl"  # None: those of the default group, for CPUs too
    return backend, options


@contextmanager
def connecting_pairs_apart() -> Iterator[None]:
    """Give groups created inside the block a communicator for each pair of ranks. Uses private torch API.

    If the default group is bound to a device (`init_process_group(device_id=…)`), torch gives each new group a single
    communicator, on which NCCL would serialize all sends and receives.
    """
    default = distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set the timeout of a group, by torch's private function before 2.14 has a public one."""
    function = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    function(timeout, group)


def torch_mesh(
    device_type: str,
    shape: tuple[int, ...],
    dims: tuple[str, ...],
    uses: Mapping[str, GroupUse] | None = None,
) -> DeviceMesh:
    """A torch mesh of all ranks, whose groups have the default group's timeout. Collective over the world.

    A dim that spans all ranks uses the default group, unless its use is urgent.
    """
    options: dict[Any, Any] = {}
    for dim, size in zip(dims, shape, strict=True):
        use = None if uses is None else uses[dim]
        spans_all_ranks = size == prod(shape)
        if use is None or (spans_all_ranks and not (use.is_urgent and size > 1)):
            continue  # it uses the default group
        if (backend_options := nccl_options(use, device_type)) is not None:
            options[dim] = backend_options
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=dims, backend_override=options or None)
    if {backend_of("cpu"), backend_of(device_type)} & {"gloo", "nccl"}:  # torch warns of other backends
        for dim in dims:
            set_timeout(default_timeout(), mesh.get_group(dim))
    wait_until_all_have_connected()
    return mesh


class ParallelMesh:
    """A layout of all ranks of the default group, with the process groups of its axes.

    Building it is collective over the world: every rank calls it with the same sizes. Groups are created here or in
    `subgroup`, in the same order on all ranks.

    Args:
        sizes: sizes of axes, as in `MeshLayout.of`.

    Raises:
        ValueError: the sizes do not fit the world size.
    """

    def __init__(self, **sizes: int) -> None:
        self.layout = layout = MeshLayout.of(dist.get_world_size(), dist.get_rank(), **sizes)
        start_watch()
        self.device = default_device()
        self._mesh = torch_mesh(self.device.type, tuple(map(layout.size, AXES)), AXES, GROUPS)
        # By axis, and a number or the coordinates of `subgroup`. Number 0 is the group of the axis, and those from 1
        # are further groups of the same ranks (`pipeline_groups`). None if this rank has none of the coordinates.
        self._groups: dict[tuple[str, Any], dist.ProcessGroup | None] = {
            (axis, 0): self._mesh.get_group(axis) for axis in AXES
        }
        for axis in ("data", *SUB_AXES):
            # A separate group even if it spans all of "data": its traffic is counted separately.
            if self.size(axis) > 1 and self._simplest(axis) == axis:
                self._groups[axis, 0] = self._new_group(
                    axis, [range(self.size(axis))], use=GROUPS.get(axis, GroupUse())
                )
        self._side_group: dist.ProcessGroup | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's own mesh, for DTensor and fully_shard."""
        return self._mesh

    @property
    def global_rank(self) -> int:
        """The rank of this process in the world."""
        return self.layout.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the mesh."""
        return self.layout.world_size

    def size(self, *axes: str) -> int:
        """The number of ranks along one axis, or along several together."""
        return self.layout.size(*axes)

    def rank(self, axis: str) -> int:
        """This process's coordinate along an axis."""
        return self.layout.coordinate(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `axis` only, in the order of their coordinates.

        A sub-axis (`SUB_AXES`) must be larger than 1; smaller ones have no group.
        """
        group = self._groups[self._simplest(axis), 0]
        assert group is not None  # every rank is in the groups of its axes; only a subgroup may be without it
        return group

    def global_ranks(self, axis: str) -> list[int]:
        """The global ranks of `group(axis)`, by coordinate."""
        return dist.get_process_group_ranks(self.group(axis))

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """The global ranks of a group, by ColossalAI's name."""
        return dist.get_process_group_ranks(group)

    def replica_stage_ranks(self) -> list[int]:
        """The global ranks of this replica that compute the same stage as this one: axes sp and tp."""
        return list(self.layout.line("sp", "tp"))

    def replica_ranks(self) -> list[int]:
        """The global ranks that get the same batches as this one: axes pp, sp and tp."""
        return list(self.layout.line("pp", "sp", "tp"))

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The axis of a group of this mesh; "world" for any other group."""
        axes = {known.group_name: axis for (axis, _), known in self._groups.items() if known is not None}
        # Groups of one rank may share a group in torch, and send nothing.
        axes |= {self.group(axis).group_name: axis for axis in AXES if self.size(axis) > 1}
        return axes.get(group.group_name, "world")

    def side_group(self) -> dist.ProcessGroup:
        """The group of all ranks between CPUs for work beside training. Collective over the world the first time.

        It has a long timeout, since ranks wait for others that write to disk. A rank that ended is noticed at once.
        """
        if self._side_group is None:
            self._side_group = self.new_group_of_all(_PATIENCE)
        return self._side_group

    def new_group_of_all(self, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """Create a group of all ranks between CPUs, separate from all others. Collective over the world."""
        group = dist.new_group(backend="gloo", timeout=timeout or default_timeout())
        wait_until_all_have_connected()
        return group

    def pipeline_groups(self, count: int) -> list[dist.ProcessGroup]:
        """Create `count` groups over the ranks of axis pp, in their order. Collective over the world.

        NCCL serializes the messages of one group between two ranks; see [Note: channels] in pipeline/transport.py.
        A later call returns the same groups; with a larger count, new ones after them.
        """
        groups = []
        for number in range(1, count + 1):
            if ("pp", number) not in self._groups:
                with connecting_pairs_apart():
                    self._groups["pp", number] = self._new_group(
                        "pp", [range(self.size("pp"))], use=GROUPS[CHANNEL]
                    )
            group = self._groups["pp", number]
            assert group is not None  # it has all coordinates
            groups.append(group)
        return groups

    def subgroup(self, axis: str, parts: Sequence[Iterable[int]]) -> dist.ProcessGroup | None:
        """The group of this rank among groups over parts of an axis.

        Collective over the world: every rank calls with equal arguments. Equal arguments return the same group, and a
        single part of all coordinates the group of the axis, where there is one.

        Args:
            axis: the axis of the coordinates.
            parts: disjoint sets of coordinates, for example `[(0, 3)]` for the two ends of four stages.

        Returns:
            The group, in the order of coordinates, or None if this rank is in no part.
        """
        name, coordinates = self._simplest(axis), tuple(tuple(part) for part in parts)
        if coordinates == (tuple(range(self.size(axis))),) and (name, 0) in self._groups:
            return self._groups[name, 0]
        if (name, coordinates) not in self._groups:
            self._groups[name, coordinates] = self._new_group(name, coordinates, use=GROUPS[SUBGROUP])
        return self._groups[name, coordinates]

    def _simplest(self, axis: str) -> str:
        """The primary axis with the same ranks as a joined axis, if there is one; otherwise the axis itself."""
        if axis not in JOINED:
            return axis
        large = [primary for primary in JOINED[axis] if self.size(primary) > 1]
        if len(large) > 1:
            return axis
        return large[0] if large else JOINED[axis][0]

    def _new_group(
        self, axis: str, parts: Sequence[Iterable[int]], *, use: GroupUse
    ) -> dist.ProcessGroup | None:
        """Create the groups of these coordinates on all lines along an axis; return this rank's. Collective."""
        group_of_rank, timeout = None, default_timeout()
        for line, part in itertools.product(self.layout.lines(axis), parts):
            ranks = [line[coordinate] for coordinate in part]
            backend, options = nccl_options(use, self.device.type) or (None, None)
            group = dist.new_group(
                ranks, timeout=timeout, backend=backend, pg_options=options, group_desc=axis
            )
            if self.global_rank in ranks:
                group_of_rank = group
        wait_until_all_have_connected()
        return group_of_rank


REPLICATE, SHARD = "replicate", "shard"


def shard_mesh(mesh: ParallelMesh, shard_size: int) -> DeviceMesh:
    """A torch mesh that shards within groups of `shard_size` neighbouring ranks, and replicates over the groups.

    Collective over the world if the groups are smaller than the world: creates process groups.

    Args:
        mesh: a mesh in which all axes but dp have size 1.
        shard_size: divides the world size.

    Returns:
        A mesh of dims (replicate, shard), or of the data axis alone if one group has all ranks.
    """
    if shard_size == mesh.world_size:
        return mesh.device_mesh["dp"]
    shape = (mesh.world_size // shard_size, shard_size)
    return torch_mesh(mesh.device.type, shape, (REPLICATE, SHARD))
