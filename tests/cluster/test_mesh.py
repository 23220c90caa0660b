"""The mesh: coordinates, groups and what is said about sizes that do not fit."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

from echelon.cluster import mesh as mesh_module
from echelon.cluster.launch import join_local_group, launch_from_torch, local_store
from echelon.cluster.layout import AXES
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.objects import broadcast_object

from ..pool import Pool


def layout(pp: int, dp: int | None, sp: int, tp: int) -> dict[str, tuple[int, int, list[int]]]:
    mesh = ParallelMesh(pp=pp, dp=dp, sp=sp, tp=tp)
    assert mesh.world_size == dist.get_world_size()
    assert mesh.size(*AXES) == mesh.world_size
    for axis in AXES:
        group = mesh.group(axis)
        assert (group.size(), group.rank()) == (mesh.size(axis), mesh.rank(axis))
        assert mesh.global_ranks(axis)[mesh.rank(axis)] == mesh.global_rank
    return {axis: (mesh.size(axis), mesh.rank(axis), mesh.global_ranks(axis)) for axis in AXES}


def data_axis() -> list[tuple[int, list[int], list[int]]]:
    axes = []
    for mesh in (ParallelMesh(dp=2, sp=2), ParallelMesh(sp=2, tp=2), ParallelMesh(dp=2, tp=2)):
        halves = mesh.subgroup("data", [(index,) for index in range(mesh.size("data"))])
        assert halves is not None
        axes.append((mesh.rank("data"), mesh.global_ranks("data"), dist.get_process_group_ranks(halves)))
    return axes


def test_replicas_and_parts_of_a_sequence_are_one_axis(pool: Pool) -> None:
    axes = pool.run(4, data_axis)
    assert [of_rank[0] for of_rank in axes] == [(rank, [0, 1, 2, 3], [rank]) for rank in range(4)]
    for mesh in (1, 2):
        assert [of_rank[mesh][:2] for of_rank in axes] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
        assert [of_rank[mesh][2] for of_rank in axes] == [[0], [1], [2], [3]]


def weight_axis(dp: int, sp: int, pp: int, wp: int) -> tuple[int, int, list[int], str, str]:
    mesh = ParallelMesh(dp=dp, sp=sp, pp=pp, wp=wp)
    names = mesh.axis_of(mesh.group("wp")), mesh.axis_of(mesh.group("data"))
    return mesh.size("wp"), mesh.rank("wp"), mesh.global_ranks("wp"), *names


def test_weights_are_shared_out_over_neighbours_of_the_data_axis(pool: Pool) -> None:
    pairs = [(2, 0, [0, 1]), (2, 1, [0, 1]), (2, 0, [2, 3]), (2, 1, [2, 3])]
    for sizes, data in (((4, 1, 1), "dp"), ((2, 2, 1), "data"), ((1, 2, 2), "sp")):
        assert pool.run(4, weight_axis, *sizes, 2) == [(*pair, "wp", data) for pair in pairs]
    expected = [(4, rank, [0, 1, 2, 3], "wp", "data") for rank in range(4)]
    assert pool.run(4, weight_axis, 2, 2, 1, 4) == expected  # with a group of its own


def ends_of_the_pipeline() -> list[int] | None:
    mesh = ParallelMesh(pp=4)
    group = mesh.subgroup("pp", [(0, 3)])
    assert mesh.subgroup("pp", [(0, 3)]) is group
    return None if group is None else dist.get_process_group_ranks(group)


def halves_of_each_line() -> list[int]:
    mesh = ParallelMesh(dp=4, tp=2)
    group = mesh.subgroup("dp", [(0, 1), (2, 3)])
    assert group is not None
    return dist.get_process_group_ranks(group)


def timeouts() -> set[float]:
    """The timeouts of the groups of a mesh, in seconds, divided by the default group's."""
    mesh, default = ParallelMesh(pp=2, tp=2), dist.distributed_c10d._get_default_group()
    groups = [default, mesh.group("tp"), mesh.group("pp"), mesh.subgroup("pp", [(0, 1)])]
    groups += mesh.pipeline_groups(2)
    backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
    assert len(backends) == 6
    seconds = [backend.options._timeout.total_seconds() for backend in backends]
    return {second / seconds[0] for second in seconds}


def test_groups_wait_as_long_as_the_default_group(pool: Pool) -> None:
    assert pool.run(4, timeouts, timeout=77.0) == [{1.0}] * 4


def groups_beside_a_bound_device() -> tuple[list[object], object]:
    """The devices that a pipeline's groups are bound to, where the default group is; and that one's then."""
    mesh, default = ParallelMesh(pp=2), dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", 0)  # which nothing here looks for
    default.bound_device_id = device
    try:
        down, up = mesh.pipeline_groups(2)
        assert down is not up and mesh.pipeline_groups(2) == [down, up]
        bound = [group.bound_device_id for group in (down, up)]
        return bound, default.bound_device_id
    finally:
        default.bound_device_id = None


def test_groups_of_a_pipeline_are_bound_to_no_device_and_so_connect_by_pairs(pool: Pool) -> None:
    assert pool.run(2, groups_beside_a_bound_device) == [([None, None], torch.device("cuda", 0))] * 2


Made = list[tuple[list[int], str | None, bool, int | None]]


class Options:
    """NCCL's, of which this build of torch has none."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None)
        self._timeout: timedelta | None = None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Ranks, backend, priority and thread blocks of each group that rank 0 of 8 makes, as if NCCL carried tensors."""
    groups: Made = []
    new_group = dist.new_group

    def recorded(
        ranks: list[int], timeout: timedelta, backend: str | None, pg_options: Options, **_: Any
    ) -> Any:
        assert timeout == pg_options._timeout == dist.distributed_c10d.default_pg_timeout
        if 0 in ranks:
            groups.append((ranks, backend, pg_options.is_high_priority_stream, pg_options.config.max_ctas))
        return new_group(ranks)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", recorded)
    monkeypatch.setattr("torch.distributed.device_mesh.new_group", recorded)
    monkeypatch.setattr(mesh_module, "backend_of", lambda device: "nccl")
    for name in ("start_watch", "wait_until_all_have_connected"):
        monkeypatch.setattr(mesh_module, name, lambda: None)
    monkeypatch.setattr(mesh_module, "set_timeout", lambda timeout, group: None)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    yield groups
    dist.destroy_process_group()


def test_groups_of_nccl_have_gloo_where_cpus_agree_in_them_and_few_thread_blocks_between_stages(
    made: Made,
) -> None:
    mesh = ParallelMesh(pp=2, dp=2, sp=2, wp=4)
    axes = {"pp": [0, 4], "dp": [0, 2], "sp": [0, 1], "tp": [0]}
    assert made[:4] == [(ranks, None, axis in ("sp", "tp"), None) for axis, ranks in axes.items()]
    assert made[4:] == [([0, 1, 2, 3], None, False, None), ([0, 1, 2, 3], "nccl", False, None)]  # data, wp
    made.clear()
    mesh.pipeline_groups(1)
    mesh.subgroup("dp", [(0,), (1,)])
    assert made == [([0, 4], "nccl", True, 4), ([0], "nccl", False, None)]
    made.clear()
    ParallelMesh(dp=4, sp=2, wp=2)
    assert [group[:2] for group in made if len(group[0]) > 1][2:] == [([*range(8)], None), ([0, 1], "nccl")]


def test_an_axis_of_all_ranks_is_the_default_group_of_nccl_unless_computation_waits_for_it(
    made: Made,
) -> None:
    world = dist.group.WORLD
    assert ParallelMesh(dp=8).group("dp") is world and ParallelMesh(tp=8).group("tp") is not world
    assert [group for group in made if len(group[0]) == 8] == [([*range(8)], None, True, None)]


def test_tensor_ranks_are_neighbours_and_stages_are_farthest(pool: Pool) -> None:
    ranks = pool.run(8, layout, 2, None, 1, 2)
    assert ranks[5] == {"pp": (2, 1, [1, 5]), "dp": (2, 0, [5, 7]), "sp": (1, 0, [5]), "tp": (2, 1, [4, 5])}
    ranks = pool.run(8, layout, 1, 2, 2, 2)
    assert ranks[6] == {"pp": (1, 0, [6]), "dp": (2, 1, [2, 6]), "sp": (2, 1, [4, 6]), "tp": (2, 0, [6, 7])}


def test_a_subgroup_holds_the_coordinates_it_names(pool: Pool) -> None:
    assert pool.run(4, ends_of_the_pipeline) == [[0, 3], None, None, [0, 3]]
    assert pool.run(8, halves_of_each_line) == [[0, 2], [1, 3]] * 2 + [[4, 6], [5, 7]] * 2


def times_of_connecting(call: str) -> tuple[float, float]:
    """When this rank had a group's connections, and when it went on; rank 1 is slow in between."""
    rank = dist.get_rank()
    store = local_store() if rank == 0 else None
    port = broadcast_object(None if store is None else store.port, 0, None)
    mesh = ParallelMesh(tp=2)
    connected = 0.0

    def slowly(connect: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal connected
        made = connect(*args, **kwargs)
        time.sleep(0.3 * rank)
        connected = time.monotonic()
        return made

    connects = ((mesh_module, "init_device_mesh"), (dist, "new_group"), (dist, "init_process_group"))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in connects:
            patch.setattr(owner, name, partial(slowly, getattr(owner, name)))
        if call == "side_group":
            mesh.side_group()
        elif call == "subgroup":
            mesh.subgroup("tp", [range(2)])
        elif call == "ParallelMesh":
            ParallelMesh(tp=2)
        else:
            dist.destroy_process_group()
            patch.setenv("MASTER_PORT", str(port))
            patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            if call == "launch_from_torch":
                launch_from_torch(backend="gloo")
            else:
                with join_local_group(rank, 2, port=port):
                    return connected, time.monotonic()
    return connected, time.monotonic()


@pytest.mark.parametrize(
    "call", ["ParallelMesh", "subgroup", "side_group", "launch_from_torch", "join_local_group"]
)
def test_no_rank_goes_on_before_all_are_connected(pool: Pool, call: str) -> None:
    times = pool.run(2, times_of_connecting, call)
    assert min(went_on for _, went_on in times) > max(connected for connected, _ in times)
