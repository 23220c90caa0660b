"""Saves that find no room on one rank, or lose a rank, on the ranks of a pool."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.checkpoint.background import Save
from echelon.cluster.rank_failure import RankFailure

from .crashes import SHARD, small_run
from .harm import told
from .runs import Run
from .write_points import full_disk, write_points

SAVING = "echelon.checkpoint.background"


def files_too_large(directory: Path, where: int, use_async: bool) -> None:
    """On one rank the system itself refuses what is longer than a kilobyte."""
    run = _first_saved(directory)
    limit = small_files() if dist.get_rank() == where else nullcontext()
    _require_told_and_survived(run, directory, limit, use_async, "File too large")


def full_at_every_call(directory: Path, where: int, use_async: bool) -> int:
    """On one rank the disk is full, from the first, the second, … the last call that writes; how many these are."""
    run = _first_saved(directory)
    number = 0
    while True:
        number += 1
        calls: list[str] = []
        with (
            write_points(directory, full_disk(number))
            if dist.get_rank() == where
            else nullcontext() as listed
        ):
            save = _begin(run, directory, use_async)
            loss = run.step(3)
            _wait(save)
            calls = listed or []
        assert loss == loss
        refused = torch.tensor(float(save.failure is not None))
        dist.all_reduce(refused)
        assert int(refused) in (0, dist.get_world_size()), "it failed on some ranks alone"
        _require_sound(run, directory)
        numbers = torch.tensor(len(calls))
        dist.all_reduce(numbers)
        if not refused:
            assert int(numbers) < number, "a call found no room, and nothing was told"
            return int(numbers)


def rank_dies_while_saving(directory: Path, number: int) -> None:
    """The second rank is killed in the middle of a save beside training; the first has to notice, twice."""
    run = _first_saved(directory)

    def point(called: int, what: str) -> None:
        if called == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with write_points(directory, point) if dist.get_rank() == 1 else nullcontext():
        save = _begin(run, directory, use_async=True)
        try:
            for step in range(3, 10**6):
                run.step(step)
        except RankFailure as failure:
            assert "rank 1" in str(failure)
        except RuntimeError as error:  # of the all-reduce that is the test's own
            assert "Connection" in str(error)
        _wait(save)
    assert save.failure is not None


def still_there(directory: Path) -> int:
    """The step that is gone on from, and the next save works."""
    run = small_run(seed=7)
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None
    _begin(run, directory, use_async=False).wait()
    assert [name for name in os.listdir(directory) if name.startswith(".")] == []
    return resumed.step


@contextmanager
def small_files() -> Iterator[None]:
    """Files of this process can have a kilobyte (EFBIG; Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _require_told_and_survived(
    run: Run, directory: Path, trouble: AbstractContextManager[object], use_async: bool, why: str
) -> None:
    before = run.whole()
    with trouble, told(SAVING) as lines:
        save = _begin(run, directory, use_async)
        _wait(save)
    assert isinstance(save.failure, OSError) and why in str(save.failure), save.failure
    assert len(lines) == (dist.get_rank() == 0) and all(why in line for line in lines)
    dist.barrier()  # the first rank removes what it began
    assert os.listdir(directory) == ["step-00000001"]
    run.step(3)
    run.booster.load_checkpoint(directory, **run.everything)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.whole().items())
    _begin(run, directory, use_async).wait()
    assert sorted(os.listdir(directory)) == ["step-00000001", "step-00000002"]


def _first_saved(directory: Path) -> Run:
    run = small_run()
    run.step(1)
    run.booster.save_checkpoint(directory, 1, **run.everything, size_per_shard=SHARD).wait()
    return run


def _begin(run: Run, directory: Path, use_async: bool) -> Save:
    return run.booster.save_checkpoint(
        directory, 2, **run.everything, size_per_shard=SHARD, use_async=use_async
    )


def _wait(save: Save) -> None:
    try:
        save.wait()
    except Exception as error:
        assert error is save.failure


def _require_sound(run: Run, directory: Path) -> None:
    """Nothing unfinished is left, and the newest step can be loaded."""
    dist.barrier()  # the first rank removes what it began
    names = sorted(os.listdir(directory))
    assert names in (["step-00000001"], ["step-00000001", "step-00000002"]), names
    dist.barrier()
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None and resumed.path.name == names[-1]
