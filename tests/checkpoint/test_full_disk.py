"""A full disk, or a rank that dies, does not damage earlier saves; a full disk does not end training."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.checkpoint.background import Save
from echelon.cluster.errors import RankFailure

from ..log_lines import logged
from ..pool import Pool, RankDied
from .failures import at_every_write, full_disk_at, kill_rank_at
from .runs import SHARD, Run, small_run


def begin(run: Run, directory: Path, use_async: bool) -> Save:
    options = {"size_per_shard": SHARD, "use_async": use_async}
    return run.booster.save_checkpoint(directory, 2, **run.everything, **options)


def first_saved(directory: Path) -> Run:
    run = small_run()
    run.step(1)
    run.booster.save_checkpoint(directory, 1, **run.everything, size_per_shard=SHARD).wait()
    return run


def wait(save: Save) -> None:
    try:
        save.wait()
    except Exception as error:
        assert error is save.failure


@contextmanager
def small_files() -> Iterator[None]:
    """Limit files of this process to a kilobyte (EFBIG; Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files_too_large(directory: Path, where: int, use_async: bool) -> None:
    """Save while the system refuses files longer than a kilobyte on one rank."""
    run = first_saved(directory)
    before = run.unsharded()
    with (
        small_files() if dist.get_rank() == where else nullcontext(),
        logged("echelon.checkpoint.background") as lines,
    ):
        save = begin(run, directory, use_async)
        wait(save)
    assert isinstance(save.failure, OSError) and "File too large" in str(save.failure), save.failure
    assert len(lines) == (dist.get_rank() == 0) and all("File too large" in line for line in lines)
    dist.barrier()  # the first rank removes the unfinished folder
    assert os.listdir(directory) == ["step-00000001"]
    run.step(3)
    run.booster.load_checkpoint(directory, **run.everything)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.unsharded().items())
    begin(run, directory, use_async).wait()
    assert sorted(os.listdir(directory)) == ["step-00000001", "step-00000002"]


def full_at_every_call(directory: Path, where: int, use_async: bool) -> int:
    """Fill the disk of one rank from the first, second, … last call that writes; return the number of calls."""
    run, number = first_saved(directory), 0
    while True:
        number += 1
        fails = (
            at_every_write(directory, full_disk_at(number)) if dist.get_rank() == where else nullcontext([])
        )
        with fails as calls:
            save = begin(run, directory, use_async)
            run.step(3)
            wait(save)
        dist.barrier()  # the first rank removes the unfinished folder
        names = sorted(os.listdir(directory))
        assert names in (["step-00000001"], ["step-00000001", "step-00000002"]), names
        dist.barrier()
        resumed = run.booster.load_checkpoint(directory, **run.everything)
        assert resumed is not None and resumed.path.name == names[-1]
        counts = torch.tensor([save.failure is not None, len(calls)], dtype=torch.int64)
        dist.all_reduce(counts)
        refused, num_calls = counts.tolist()
        assert refused in (0, dist.get_world_size()), "it failed on some ranks alone"
        if not refused:
            assert num_calls < number, "a call found no room, and nothing was reported"
            return num_calls


def rank_dies_while_saving(directory: Path, number: int) -> None:
    """Kill the second rank during an asynchronous save; training and save of the first must both fail."""
    run = first_saved(directory)
    with at_every_write(directory, kill_rank_at(1, number)) if dist.get_rank() == 1 else nullcontext():
        save = begin(run, directory, use_async=True)
        try:
            for step in range(3, 10**6):
                run.step(step)
        except RankFailure as failure:
            assert "rank 1" in str(failure)
        except RuntimeError as error:  # raised by the test's own all-reduce
            assert "Connection" in str(error)
        wait(save)
    assert save.failure is not None


def still_there(directory: Path) -> int:
    """Resume, save again, and return the step from which the run resumed."""
    run = small_run(seed=7)
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None
    begin(run, directory, use_async=False).wait()
    assert [name for name in os.listdir(directory) if name.startswith(".")] == []
    return resumed.step


@pytest.mark.parametrize(("where", "use_async"), [pytest.param(0, False, marks=pytest.mark.slow), (1, True)])
def test_a_full_disk_is_reported_and_training_continues(
    pool: Pool, tmp_path: Path, where: int, use_async: bool
) -> None:
    pool.run(2, files_too_large, tmp_path, where, use_async)


@pytest.mark.slow
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_a_disk_that_is_full_at_any_call(pool: Pool, tmp_path: Path, where: int, use_async: bool) -> None:
    calls = pool.run(2, full_at_every_call, tmp_path, where, use_async, timeout=250)[0]
    assert calls >= (30 if where == 0 else 10)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_rank_that_dies_while_saving_is_noticed(pool: Pool, tmp_path: Path, number: int) -> None:
    first, second = pool.run_failing(2, rank_dies_while_saving, tmp_path, number)
    assert first is None and isinstance(second, RankDied)
    assert pool.run(2, still_there, tmp_path) == [1, 1]
