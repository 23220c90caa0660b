"""The mesh of processes: which ranks share which axis. What they exchange is collectives.py."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .device import backend_of, default_device
from .errors import raise_errors
from .failures import start_watch
from .heartbeats import default_timeout
from .launch import torchrun_command, wait_until_all_have_connected

AXES = ("pp", "dp", "sp", "tp")
# An axis that joins others: the ranks that add to the gradients of the same parameters.
JOINED = {"data": ("dp", "sp")}
# Axes of so many neighbours of "data" each. A placement may name one: ZeRO then has the rest of "data" for replicas.
PARTS_OF_DATA = ("wp",)
_PATIENCE = timedelta(hours=6)


@dataclass(frozen=True, kw_only=True)
class GroupUse:
    """What a kind of group is for. NCCL is set up by it, where it carries the device's tensors; others have no options.

    Attributes:
        on_cpus: ranks also agree in it, by integers of their CPUs. Without, the group has no gloo, its connections and
            threads.
        is_urgent: computation waits for it at once, so its kernels go before others.
        max_ctas: the most thread blocks of a kernel; None is NCCL's choice.
    """

    on_cpus: bool = False
    is_urgent: bool = False
    max_ctas: int | None = None


# [Note: groups of NCCL] Receives that are posted ahead stay on the GPU until their sender comes, up to four at a time,
# and would keep as many multiprocessors from computing as NCCL gives them.
CHANNEL, PART = "channel", "part"
GROUPS = {
    "tp": GroupUse(on_cpus=True, is_urgent=True),
    "sp": GroupUse(on_cpus=True, is_urgent=True),
    "pp": GroupUse(on_cpus=True),
    "dp": GroupUse(on_cpus=True),
    "data": GroupUse(on_cpus=True),
    "wp": GroupUse(),
    CHANNEL: GroupUse(is_urgent=True, max_ctas=4),  # between the stages of a pipeline
    PART: GroupUse(),  # some ranks of an axis: rings, replicas of a weight
}


def nccl_options(use: GroupUse, device_type: str) -> tuple[str | None, Any] | None:
    """Backend and options of a new group, for torch; None where no NCCL carries the tensors of this kind of device."""
    if backend_of(device_type) != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=use.is_urgent)
    options._timeout = default_timeout()  # private to torch, which warns where it differs from the group's
    if use.max_ctas is not None:
        options.config.min_ctas, options.config.max_ctas = 1, use.max_ctas
    return None if use.on_cpus else "nccl", options


def mesh_errors(
    *, world_size: int, pp: int = 1, dp: int | None = None, sp: int = 1, tp: int = 1, wp: int = 1
) -> list[str]:
    """All that is wrong with the sizes of a mesh, each with what would work; empty when they fit."""
    sizes = {"pp": pp, "dp": 1 if dp is None else dp, "sp": sp, "tp": tp, "wp": wp}
    if errors := [f"{axis}_size={size} must be at least 1" for axis, size in sizes.items() if size < 1]:
        return errors
    inner = pp * sp * tp
    wanted = inner * (dp or 1)
    if world_size == 1 and wanted > 1:
        return [
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} * dp_size={dp or 1} = {wanted} needs {wanted} processes, and "
            f"this is the only one: start it by `{torchrun_command(wanted)}`"
        ]
    if dp is None and world_size % inner:
        return [
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} = {inner} does not divide the world size "
            f"{world_size}: start a multiple of {inner} processes, or use sizes whose product is one of "
            f"{divisors(world_size)}"
        ]
    if dp is not None and wanted != world_size:
        return [
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} * dp_size={dp} = {wanted} is not the world size "
            f"{world_size}: start {wanted} processes"
            + (f", or use dp_size={world_size // inner}" if world_size % inner == 0 else "")
        ]
    if (data_size := world_size // (pp * tp)) % wp:
        return [
            f"wp_size={wp} does not divide the {data_size} ranks whose gradients are averaged (dp_size * sp_size): "
            f"use one of wp_size={divisors(data_size)}"
        ]
    return []


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


def torch_mesh(
    device_type: str,
    shape: tuple[int, ...],
    dims: tuple[str, ...],
    uses: Mapping[str, GroupUse] | None = None,
) -> DeviceMesh:
    """A torch mesh of all ranks whose groups wait as long as the default one. Collective over the world.

    A dim of all ranks is the default group, unless it is urgent.
    """
    given = {
        dim: uses[dim]
        for dim, size in zip(dims, shape, strict=True)
        if uses is not None and (size < prod(shape) or (size > 1 and uses[dim].is_urgent))
    }
    options: dict[Any, Any] = {}
    for dim, use in given.items():
        if (found := nccl_options(use, device_type)) is not None:
            options[dim] = found
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=dims, backend_override=options or None)
    if {backend_of("cpu"), backend_of(device_type)} & {"gloo", "nccl"}:  # torch warns of others
        for dim in dims:
            distributed_c10d._set_pg_timeout(default_timeout(), mesh.get_group(dim))
    wait_until_all_have_connected()
    return mesh


class ParallelMesh:
    """All ranks of the default group arranged as pp × dp × sp × tp, tp innermost.

    Derived axes: "data" is dp and sp together, the ranks whose gradients are averaged. "wp", where it is above 1, is so
    many neighbours of it, over which the weights of linear layers are sharded.

    Building it is collective over the world: every rank calls it with the same sizes. Groups are made here
    or in `subgroup`, in one order on all ranks.

    Args:
        pp, sp, tp: sizes of the pipeline, sequence and tensor axes.
        dp: the number of replicas; None takes what the world size leaves.
        wp: size of the axis "wp"; it divides dp * sp.

    Raises:
        ValueError: the sizes do not multiply to the world size.
    """

    def __init__(self, *, pp: int = 1, dp: int | None = None, sp: int = 1, tp: int = 1, wp: int = 1) -> None:
        world_size = dist.get_world_size()
        raise_errors(mesh_errors(world_size=world_size, pp=pp, dp=dp, sp=sp, tp=tp, wp=wp))
        start_watch()
        self.device = default_device()
        self._mesh = torch_mesh(self.device.type, (pp, world_size // (pp * sp * tp), sp, tp), AXES, GROUPS)
        self._lines = {axis: self._along(axis) for axis in AXES}
        self._lines |= {axis: self._along(*joined) for axis, joined in JOINED.items()}
        for axis, size in zip(PARTS_OF_DATA, (wp,), strict=True):
            self._lines[axis] = self._lines["data"].reshape(-1, size)
        self._own = {axis: _line_of(self.global_rank, lines) for axis, lines in self._lines.items()}
        # By axis, and by its chosen coordinates or the number of a group over all of them.
        self._groups: dict[tuple[str, Any], dist.ProcessGroup | None] = {
            (axis, 0): self._mesh.get_group(axis) for axis in AXES
        }
        for axis in (*JOINED, *PARTS_OF_DATA):
            # Of its own also where it is all of "data": its traffic is counted apart.
            if self.size(axis) > 1 and self._simplest(axis) == axis:
                self._groups[axis, 0] = self._new_group(axis, [range(self.size(axis))], use=GROUPS[axis])
        self._side_group: dist.ProcessGroup | None = None

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
        return prod(len(self._own[axis]) for axis in axes)

    def rank(self, axis: str) -> int:
        """This process's coordinate along an axis."""
        return self._own[axis].index(self.global_rank)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in `axis` alone, in the order of their coordinates.

        There is none for a part of "data" of one rank.
        """
        group = self._groups[self._simplest(axis), 0]
        assert group is not None  # every rank is in one
        return group

    def global_ranks(self, axis: str) -> list[int]:
        """The world's ranks of `group(axis)`, by coordinate."""
        return dist.get_process_group_ranks(self.group(axis))

    def replica_stage_ranks(self) -> list[int]:
        """Those of `replica_ranks` that compute the same stage as this one: axes sp and tp."""
        return _line_of(self.global_rank, self._along("sp", "tp"))

    def replica_ranks(self) -> list[int]:
        """The world's ranks that get the same batches as this one: axes pp, sp and tp."""
        return _line_of(self.global_rank, self._along("pp", "sp", "tp"))

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The axis that a group of this mesh lies along; "world" for any other."""
        along = {each.group_name: axis for (axis, _), each in self._groups.items() if each is not None}
        # Groups of one rank may be one group in torch, and nothing is sent in them.
        along |= {self.group(axis).group_name: axis for axis in AXES if self.size(axis) > 1}
        return along.get(group.group_name, "world")

    def side_group(self) -> dist.ProcessGroup:
        """All ranks, over the CPU, for what goes on beside training. Collective over the world the first time.

        A rank may be kept waiting for as long as another writes to a disk; one that ended is noticed at once.
        """
        if self._side_group is None:
            self._side_group = self.new_group_of_all(_PATIENCE)
        return self._side_group

    def new_group_of_all(self, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """A group of all ranks, between CPUs, whose messages meet no others. Collective over the world."""
        group = dist.new_group(backend="gloo", timeout=timeout or default_timeout())
        wait_until_all_have_connected()
        return group

    def pipeline_groups(self, count: int) -> list[dist.ProcessGroup]:
        """As many different groups over the ranks of axis pp, in their order. Collective over the world.

        What one group carries between two ranks NCCL runs in a single order; see [Note: channels] in
        pipeline/transport.py. The first groups are the same at every call.
        """
        for number in range(1, count + 1):
            if ("pp", number) not in self._groups:
                with connecting_pairs_apart():
                    self._groups["pp", number] = self._new_group(
                        "pp", [range(self.size("pp"))], use=GROUPS[CHANNEL]
                    )
        groups = [self._groups["pp", number] for number in range(1, count + 1)]
        return [group for group in groups if group is not None]

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
            self._groups[key] = self._new_group(*key, use=GROUPS[PART])
        return self._groups[key]

    def _along(self, *axes: str) -> Tensor:
        """(groups, ranks): the world's ranks that differ in these axes alone, the last one innermost."""
        dims = [AXES.index(axis) for axis in axes]
        moved = self._mesh.mesh.movedim(dims, list(range(-len(dims), 0)))
        return moved.reshape(-1, prod(moved.shape[-len(dims) :]))

    def _simplest(self, axis: str) -> str:
        """The axis of the mesh itself where a joined one is no more than that."""
        large = [each for each in JOINED.get(axis, ()) if self.size(each) > 1]
        return axis if axis not in JOINED or len(large) > 1 else (large or JOINED[axis])[0]

    def _new_group(
        self, axis: str, parts: Sequence[Iterable[int]], *, use: GroupUse
    ) -> dist.ProcessGroup | None:
        mine, timeout = None, default_timeout()
        for line, part in itertools.product(self._lines[axis].tolist(), parts):
            ranks = [line[coordinate] for coordinate in part]
            backend, options = nccl_options(use, self.device.type) or (None, None)
            group = dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options)
            if self.global_rank in ranks:
                mine = group
        wait_until_all_have_connected()
        return mine


def _line_of(rank: int, lines: Tensor) -> list[int]:
    """The ranks of the group that a rank is in."""
    return next(line for line in lines.tolist() if rank in line)


REPLICATE, SHARD = "replicate", "shard"


def shard_mesh(mesh: ParallelMesh, shard_size: int) -> DeviceMesh:
    """A torch mesh of all ranks: neighbours in groups of `shard_size` shard what each group has whole.

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
