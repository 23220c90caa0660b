"""Starting a run: under plain python, under torchrun, and with an environment that is not whole."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.coordinator import DistCoordinator
from echelon.cluster.launch import TORCHRUN_VARIABLES, join_local_group, launch_from_torch, local_store

from ..pool import Pool

SCRIPT = """
import torch
import torch.distributed as dist
from echelon.cluster.coordinator import DistCoordinator
from echelon.cluster.launch import default_device, launch_from_torch

launch_from_torch(seed=7, backend="gloo")
coordinator = DistCoordinator()
total = torch.tensor(coordinator.rank + 1)
dist.all_reduce(total)
seeded = torch.rand(())
same = seeded.clone()
dist.broadcast(same, 0)
coordinator.print_on_master(
    f"world={coordinator.world_size} total={total.item()} equal={bool(seeded == same)} on={default_device()}"
)
coordinator.destroy()
"""


def without_torchrun() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No variable of torchrun is set, and no process group is left behind."""
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("command", "world_size", "total"),
    [
        ([sys.executable], 1, 1),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], 2, 3),
    ],
    ids=["python", "torchrun"],
)
def test_one_script_runs_under_python_and_torchrun(
    tmp_path: os.PathLike, command: list[str], world_size: int, total: int
) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(SCRIPT)
    done = subprocess.run(
        [*command, script], env=without_torchrun(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"world={world_size} total={total} equal=True on=cpu"]


@pytest.mark.parametrize("present", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_an_environment_that_is_not_whole_is_refused(
    bare_environment: pytest.MonkeyPatch, present: str
) -> None:
    bare_environment.setenv(present, "0")
    with pytest.raises(ValueError, match=rf"sets {present} but not .*MASTER_PORT.*torchrun"):
        launch_from_torch()
    assert not dist.is_initialized()


def test_an_address_alone_does_not_hinder_a_single_process(bare_environment: pytest.MonkeyPatch) -> None:
    bare_environment.setenv("MASTER_ADDR", "localhost")
    launch_from_torch(backend="gloo", seed=3)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    first = torch.rand(2)
    launch_from_torch(backend="gloo", seed=3)
    assert torch.equal(torch.rand(2), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is refused only without a CUDA device")
def test_nccl_without_a_device_is_refused(bare_environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend='nccl' needs a CUDA device"):
        launch_from_torch(backend="nccl")


def test_a_coordinator_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="launch_from_torch"):
        DistCoordinator()


def order_of_execution(executor: int, folder: str) -> list[str]:
    coordinator = DistCoordinator()
    with coordinator.priority_execution(executor), open(os.path.join(folder, "order"), "a") as file:
        file.write(f"{coordinator.rank}\n")
    with open(os.path.join(folder, "order")) as file:
        return file.read().split()


def act_on_master() -> tuple[bool, bool, int | None]:
    coordinator = DistCoordinator()
    coordinator.block_all()
    run = coordinator.on_master_only()(dist.get_rank)
    return coordinator.is_master(), coordinator.is_last_process(), run()


def times_of_joining(starts: str) -> tuple[float, float]:
    """When this rank had its connections, and when the launch returned; rank 1 is slow in between."""
    rank = dist.get_rank()
    store = local_store() if rank == 0 else None
    port: list[Any] = [store.port if store is not None else None]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    connect = dist.init_process_group
    connected = 0.0

    def connect_slowly(*args: Any, **kwargs: Any) -> None:
        nonlocal connected
        connect(*args, **kwargs)
        time.sleep(0.5 * rank)
        connected = time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", connect_slowly)
        patch.setenv("MASTER_PORT", str(port[0]))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        if starts == "launch_from_torch":
            launch_from_torch(backend="gloo")
            return connected, time.monotonic()
        with join_local_group(rank, 2, port=port[0]):
            return connected, time.monotonic()


@pytest.mark.parametrize("starts", ["launch_from_torch", "join_local_group"])
def test_no_rank_goes_on_before_all_have_joined(pool: Pool, starts: str) -> None:
    times = pool.run(2, times_of_joining, starts)
    assert min(returned for _, returned in times) > max(connected for connected, _ in times)


def test_one_rank_runs_a_block_before_the_others(pool: Pool, tmp_path: os.PathLike) -> None:
    for order in pool.run(3, order_of_execution, 2, str(tmp_path)):
        assert order[0] == "2"
        assert sorted(order) == ["0", "1", "2"]


def test_the_master_is_the_first_rank(pool: Pool) -> None:
    assert pool.run(2, act_on_master) == [(True, False, 0), (False, True, None)]
