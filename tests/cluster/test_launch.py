"""Starting a run: under plain python, under torchrun, and with an environment that is not whole."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.coordinator import DistCoordinator
from echelon.cluster.launch import TORCHRUN_VARIABLES, launch_from_torch

from ..docs.scripts import users_environment, without_name_service
from ..pool import Pool

# Models of transformers register the backend "fake" when they are imported.
SCRIPT = """
import torch
import torch.distributed as dist
from echelon.cluster.coordinator import DistCoordinator
from echelon.cluster.device import default_device
from echelon.cluster.launch import launch_from_torch
from torch.testing._internal.distributed import fake_pg

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
    return {name: value for name, value in users_environment().items() if name not in TORCHRUN_VARIABLES}


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
        pytest.param(
            *([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], 2, 3),
            marks=pytest.mark.slow,  # the scripts of the README and of the examples run under it
        ),
    ],
    ids=["python", "torchrun"],
)
def test_one_script_runs_under_python_and_torchrun(
    tmp_path: Path, command: list[str], world_size: int, total: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([*command, script], env=without_torchrun(), **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"world={world_size} total={total} equal=True on=cpu"]
    assert without_name_service(done.stderr) == ""


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
def test_what_needs_a_device_or_a_process_group_says_so(bare_environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend='nccl' needs a CUDA device"):
        launch_from_torch(backend="nccl")
    with pytest.raises(RuntimeError, match="launch_from_torch"):
        DistCoordinator()


def coordinate(folder: Path) -> list[str]:
    coordinator = DistCoordinator()
    is_first, is_last = coordinator.rank == 0, coordinator.rank == 2
    assert (coordinator.is_master(), coordinator.is_last_process()) == (is_first, is_last)
    assert coordinator.on_master_only()(dist.get_rank)() == (0 if is_first else None)
    with coordinator.priority_execution(2), (folder / "order").open("a") as file:
        file.write(f"{coordinator.rank}\n")
    coordinator.block_all()
    return (folder / "order").read_text().split()


def test_one_rank_runs_a_block_before_the_others(pool: Pool, tmp_path: Path) -> None:
    for order in pool.run(3, coordinate, tmp_path):
        assert order[0] == "2"
        assert sorted(order) == ["0", "1", "2"]


def fail_in_priority(failing: int) -> int:
    """Fail in the block on one rank; return the number of barriers of this rank, none of which waits."""
    with patch.object(dist, "barrier") as barrier, suppress(OSError), DistCoordinator().priority_execution(1):
        if dist.get_rank() == failing:
            raise OSError("no file")
    return barrier.call_count


def test_no_rank_waits_for_one_that_failed_in_its_block(pool: Pool) -> None:
    for failing in range(2):
        assert pool.run(2, fail_in_priority, failing) == [2, 2]


DEVICE, TIMEOUT = "is not a device: use 'cpu', 'cuda'", "must be a number of seconds above 0"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("device", device, DEVICE) for device in ("gpu", "", -1, 1.5, True, [])),
        *(("timeout_seconds", time, TIMEOUT) for time in (0, -1, "10", math.nan, math.inf, None, True)),
    ],
)
def test_a_device_or_timeout_that_is_none_is_refused(
    bare_environment: pytest.MonkeyPatch, name: str, value: object, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} {words}")):
        launch_from_torch(**{name: value})  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_all_that_is_wrong_with_a_start_is_said_at_once(bare_environment: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN_VARIABLES, ("0", "two", "x", "127.0.0.1", "29500"), strict=True):
        bare_environment.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        launch_from_torch(device="gpu", backend="foo", seed=2**70, timeout_seconds=-1)
    for expected in (
        "WORLD_SIZE='two' in the environment must be an integer",
        "LOCAL_RANK='x' in the environment must be an integer",
        "device='gpu' is not a device",
        "backend='foo' is unknown: use 'nccl', 'gloo'",
        f"seed={2**70} must be an integer from",
        "timeout_seconds=-1 must be",
    ):
        assert expected in str(caught.value)
    assert not dist.is_initialized()
