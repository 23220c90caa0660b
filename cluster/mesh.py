"""The mesh of processes: which ranks share which axis. What they exchange is collectives.py."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .failures import default_timeout, start_watch
from .launch import default_device, torchrun_command, wait_until_all_have_connected

AXES = ("pp", "dp", "sp", "tp")
# The ranks that add to the gradients of the same parameters: replicas, and in each the parts of a sequence.
DATA = ("dp", "sp")
_PATIENCE = timedelta(hours=6)


def mesh_faults(
    *, world_size: int, pp: int = 1, dp: int | None = None, sp: int = 1, tp: int = 1, wp: int = 1
) -> list[str]:
    """All that is wrong with the sizes of a mesh, each with what would work; empty when they fit."""
    sizes = {"pp": pp, "dp": 1 if dp is None else dp, "sp": sp, "tp": tp, "wp": wp}
    faults = [f"{axis}_size={size} must be at least 1" for axis, size in sizes.items() if size < 1]
    if faults:
        return faults
    inner = pp * sp * tp
    wanted = inner * (dp or 1)
    if world_size == 1 and wanted > 1:
        faults.append(
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} * dp_size={dp or 1} = {wanted} needs {wanted} processes, and "
            f"this is the only one: start it by `{torchrun_command(wanted)}`"
        )
    elif dp is None and world_size % inner:
        faults.append(
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} = {inner} does not divide the world size "
            f"{world_size}: start a multiple of {inner} processes, or use sizes whose product is one of "
            f"{divisors(world_size)}"
        )
    elif dp is not None and dp * inner != world_size:
        faults.append(
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} * dp_size={dp} = {inner * dp} is not the world size "
            f"{world_size}: start {inner * dp} processes"
            + (f", or use dp_size={world_size // inner}" if world_size % inner == 0 else "")
        )
    return faults or weight_size_faults(wp, world_size // (pp * tp))


def weight_size_faults(wp_size: int, data_size: int) -> list[str]:
    """Why so many neighbours cannot share out weights; empty when they can.

    Args:
        wp_size: the neighbours, 1 or more.
        data_size: ranks whose gradients are averaged, dp_size * sp_size.
    """
    if data_size % wp_size == 0:
        return []
    return [
        f"wp_size={wp_size} does not divide the {data_size} ranks whose gradients are averaged (dp_size * sp_size): "
        f"use one of wp_size={divisors(data_size)}"
    ]


def divisors(number: int) -> list[int]:
    """All divisors of `number`, rising: what an error message offers."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


@contextmanager
def connecting_pairs_apart() -> Iterator[None]:
    """Groups that are made inside get a communicator for each pair of ranks that exchange something. Private to torch.

    Where the default group was bound to a device (`init_process_group(device_id=…)`), torch gives each new group one
    communicator for all its ranks, on which NCCL would run all that they send and receive one after the other.
    """
    default = distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def torch_mesh(device_type: str, shape: tuple[int, ...], dims: tuple[str, ...]) -> DeviceMesh:
    """A torch mesh of all ranks whose groups wait as long as the default one. Collective over the world."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=dims)
    for dim in dims:
        distributed_c10d._set_pg_timeout(default_timeout(), mesh.get_group(dim))
    wait_until_all_have_connected()
    return mesh


class ParallelMesh:
    """All ranks of the default group arranged as pp × dp × sp × tp, tp innermost.

    Besides these four there are two more. "data" is dp and sp together: the ranks whose gradients are averaged.
    "weight", where wp > 1, is so many neighbours of it, which share out the weights of linear layers.

    Building it is collective over the world: every rank calls it with the same sizes. Groups are made here
    or in `subgroup`, in one order on all ranks.

    Args:
        pp, sp, tp: sizes of the pipeline, sequence and tensor axes.
        dp: the number of replicas; None takes what the world size leaves.
        wp: size of the weight axis; it divides dp * sp.

    Raises:
        ValueError: the sizes do not multiply to the world size.
    """

    def __init__(self, *, pp: int = 1, dp: int | None = None, sp: int = 1, tp: int = 1, wp: int = 1) -> None:
        world_size = dist.get_world_size()
        if faults := mesh_faults(world_size=world_size, pp=pp, dp=dp, sp=sp, tp=tp, wp=wp):
            raise ValueError("; ".join(faults))
        start_watch()
        self.device = default_device()
        shape = (pp, world_size // (pp * sp * tp), sp, tp)
        self._mesh = torch_mesh(self.device.type, shape, AXES)
        self._weight_size = wp
        self._data_group: dist.ProcessGroup | None = None
        self._weight_group: dist.ProcessGroup | None = None
        self._groups: dict[tuple, dist.ProcessGroup | None] = {}
        self._pipeline_groups: list[dist.ProcessGroup] = []
        self._side_group: dist.ProcessGroup | None = None
        if self._simplest("data") == "data":
            self._data_group = self._new_group("data", (range(self.size("data")),))
        if wp > 1:  # of its own also where it is all of the data axis: what travels on it is counted apart
            firsts = range(0, self.size("data"), wp)
            self._weight_group = self._new_group(
                self._simplest("data"), [range(first, first + wp) for first in firsts]
            )

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's own mesh, for what takes one (DTensor, fully_shard)."""
        return self._mesh

    @property
    def global_rank(self) -> int:
        """This process in the world."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes on all axes."""
        return dist.get_world_size()

    def size(self, *axes: str) -> int:
        """The number of ranks along one axis, or along several together."""
        if "weight" in axes:
            return self._weight_size * self.size(*(axis for axis in axes if axis != "weight"))
        single = [each for axis in axes for each in (DATA if axis == "data" else (axis,))]
        return prod(self._mesh.size(AXES.index(axis)) for axis in single)

    def rank(self, axis: str) -> int:
        """This process's coordinate along an axis."""
        if axis == "data":
            return self.rank("dp") * self.size("sp") + self.rank("sp")
        if axis == "weight":
            return self.rank("data") % self._weight_size
        return self._mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in `axis` alone, in the order of their coordinates.

        There is none for "weight" where wp is 1.
        """
        axis = self._simplest(axis)
        if axis == "weight":
            assert self._weight_group is not None
            return self._weight_group
        if axis == "data":
            assert self._data_group is not None
            return self._data_group
        return self._mesh.get_group(axis)

    def global_ranks(self, axis: str) -> list[int]:
        """The world's ranks of `group(axis)`, by coordinate."""
        return dist.get_process_group_ranks(self.group(axis))

    def model_ranks(self) -> list[int]:
        """The world's ranks that compute one replica, on this rank's stage: axes sp and tp."""
        ranks: list[int] = self._mesh.mesh[self.rank("pp"), self.rank("dp")].flatten().tolist()
        return ranks

    def replica_ranks(self) -> list[int]:
        """The world's ranks that get the same batches as this one: axes pp, sp and tp."""
        ranks: list[int] = self._mesh.mesh[:, self.rank("dp")].flatten().tolist()
        return ranks

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The axis that a group of this mesh lies along; "world" for any other."""
        along = {self.group(axis).group_name: axis for axis in AXES if self.size(axis) > 1}
        along |= {each.group_name: "pp" for each in self._pipeline_groups}
        along |= {} if self._data_group is None else {self._data_group.group_name: "data"}
        along |= {} if self._weight_group is None else {self._weight_group.group_name: "weight"}
        along |= {each.group_name: axis for (axis, _), each in self._groups.items() if each is not None}
        return along.get(group.group_name, "world")

    def side_group(self) -> dist.ProcessGroup:
        """All ranks, over the CPU, for what goes on beside training. Collective over the world the first time.

        A rank may be kept waiting for as long as another writes to a disk; one that ended is noticed at once.
        """
        if self._side_group is None:
            self._side_group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            wait_until_all_have_connected()
        return self._side_group

    def new_group_of_all(self) -> dist.ProcessGroup:
        """A group of all ranks, between CPUs, whose messages meet no others. Collective over the world."""
        group = dist.new_group(backend="gloo", timeout=default_timeout())
        wait_until_all_have_connected()
        return group

    def pipeline_groups(self, count: int) -> list[dist.ProcessGroup]:
        """As many different groups over the ranks of axis pp, in their order. Collective over the world.

        What one group carries between two ranks NCCL runs in a single order; see [Note: channels] in
        pipeline/transport.py. The first groups are the same at every call.
        """
        while len(self._pipeline_groups) < count:
            with connecting_pairs_apart():
                group = self._new_group("pp", (tuple(range(self.size("pp"))),))
            assert group is not None
            self._pipeline_groups.append(group)
        return self._pipeline_groups[:count]

    def subgroup(self, axis: str, parts: Sequence[Iterable[int]]) -> dist.ProcessGroup | None:
        """The group of those coordinates of `axis` that a part names and this rank is in.

        Collective over the world: every rank calls with equal arguments. The same parts give the same group.

        Args:
            axis: the axis along which coordinates are chosen.
            parts: disjoint sets of coordinates, for example `[(0, 3)]` for the two ends of four stages.

        Returns:
            The group, in the order of coordinates, or None where this rank is in no part.
        """
        key = (self._simplest(axis), tuple(tuple(part) for part in parts))
        if key not in self._groups:
            self._groups[key] = self._new_group(*key)
        return self._groups[key]

    def _simplest(self, axis: str) -> str:
        """An axis of the mesh itself, where "data" is one."""
        if axis != "data" or all(self.size(each) > 1 for each in DATA):
            return axis
        return "dp" if self.size("sp") == 1 else "sp"

    def _new_group(self, axis: str, parts: Sequence[Iterable[int]]) -> dist.ProcessGroup | None:
        dims = [AXES.index(each) for each in (DATA if axis == "data" else (axis,))]
        last = list(range(-len(dims), 0))
        lines = self._mesh.mesh.movedim(dims, last).reshape(-1, self.size(axis))
        mine = None
        timeout = default_timeout()
        for line, part in itertools.product(lines.tolist(), parts):
            ranks = [line[coordinate] for coordinate in part]
            group = dist.new_group(ranks, timeout=timeout)
            if self.global_rank in ranks:
                mine = group
        wait_until_all_have_connected()
        return mine


REPLICATE, SHARD = "replicate", "shard"


def shard_mesh(mesh: ParallelMesh, shard_size: int) -> DeviceMesh:
    """A torch mesh of all ranks: neighbours in groups of `shard_size` share out what each group has whole.

    Collective over the world where the groups are smaller than it: makes process groups.

    Args:
        mesh: one that has no axis but dp.
        shard_size: divides the world size.

    Returns:
        Of the dims (replicate, shard), or of the data axis alone where one group has all ranks.
    """
    if shard_size == mesh.world_size:
        return mesh.device_mesh["dp"]
    shape = (mesh.world_size // shard_size, shard_size)
    return torch_mesh(mesh.device.type, shape, (REPLICATE, SHARD))
