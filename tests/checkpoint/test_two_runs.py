"""Two runs that save to one place at one moment: the later one replaces the earlier one, whole."""

import errno
import fcntl
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from echelon.checkpoint import commit as module
from echelon.checkpoint.commit import finish_placing, locked
from echelon.checkpoint.steps import begin_step, commit_step, recover, steps_in

from .failures import in_warm_process, run_ranks
from .runs import small_run

SAVES = 12
RUNS = (1, 2)


def save_often(place: Path, number: int) -> None:
    """The saves of a run, all of whose weights are its number; each has files of another size."""
    run = small_run()
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.fill_(number)
    (place / f"ready-{number}-{os.getpid()}").touch()
    while len(list(place.glob("ready-*"))) < 2 * len(RUNS):
        time.sleep(0.001)
    for _ in range(SAVES):
        run.booster.save_model(run.model, place / "model", shard=True, size_per_shard=0.004 * number)
        run.booster.save_optimizer(run.optimizer, place / "optimizer")
        run.booster.save_checkpoint(place / "steps", 3, model=run.model, size_per_shard=0.004 * number).wait()


def save_often_alone(place: Path, number: int) -> None:
    assert run_ranks(2, save_often, place, number) == [0, 0]


def save_in_two_runs(place: Path) -> None:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=save_often_alone, args=(place, number)) for number in RUNS]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0]
    assert run_ranks(1, load, place) == [0]


def load(place: Path) -> None:
    """What stands is of one of the runs, and can be loaded."""
    run = small_run()
    run.booster.load_model(run.model, place / "model")
    run.booster.load_optimizer(run.optimizer, place / "optimizer")
    assert len({value for weight in run.model.parameters() for value in weight.unique().tolist()}) == 1
    assert run.booster.load_checkpoint(place / "steps", model=run.model) is not None
    assert len({value for weight in run.model.parameters() for value in weight.unique().tolist()}) == 1


def test_the_later_of_two_runs_replaces_the_earlier_whole(tmp_path: Path) -> None:
    in_warm_process(save_in_two_runs, tmp_path, seconds=120)
    for folder in (tmp_path / "model", tmp_path / "steps" / "step-00000003" / "model"):
        files = list(folder.glob("*.safetensors"))
        assert {path.name.rpartition("-of-")[2] for path in files} == {f"{len(files):05}.safetensors"}
        assert len({float(tensor.max()) for path in files for tensor in load_file(path).values()}) == 1
    for folder in tmp_path, tmp_path / "model", tmp_path / "optimizer", tmp_path / "steps":
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_one_who_gives_names_waits_for_another(tmp_path: Path) -> None:
    (tmp_path / ".complete").mkdir()
    (tmp_path / ".step-00000004.replaced-x").mkdir()
    (tmp_path / ".step-00000004.replaced-x" / "manifest.json").touch()
    writing = begin_step(tmp_path / "steps", 3)
    waiting = [
        threading.Thread(target=finish_placing, args=[tmp_path]),
        threading.Thread(target=recover, args=[tmp_path]),
        threading.Thread(target=commit_step, args=(writing, tmp_path / "steps", 3, {})),
    ]
    with locked(tmp_path), locked(tmp_path / "steps"):
        for thread in waiting:
            thread.start()
        time.sleep(0.3)
        assert all(thread.is_alive() for thread in waiting)
        assert (tmp_path / ".complete").exists() and not steps_in(tmp_path) and not steps_in(writing.parent)
    for thread in waiting:
        thread.join()
    assert not (tmp_path / ".complete").exists()
    assert len(steps_in(tmp_path)) == len(steps_in(writing.parent)) == 1


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    kept = []
    original = os.open

    def opened(*args: Any) -> int:
        descriptor = original(*args)
        kept.append(os.dup(descriptor))  # as in a process that is forked now
        return descriptor

    with patch.object(os, "open", opened), locked(tmp_path):
        pass
    with patch.object(module, "_PATIENCE", 0.0), locked(tmp_path):
        pass
    for descriptor in kept:
        os.close(descriptor)


def test_one_who_waits_for_too_long_says_for_what(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        patch.object(module, "_PATIENCE", 0.0),
        pytest.raises(OSError, match=f"another process has been giving files in {tmp_path} their names"),
        locked(tmp_path),
    ):
        pass


def test_where_the_file_system_locks_no_folders_saving_goes_on(tmp_path: Path) -> None:
    refused = OSError(errno.EOPNOTSUPP, "not supported")
    with patch.object(fcntl, "flock", side_effect=refused):
        commit_step(begin_step(tmp_path, 3), tmp_path, 3, {})
    assert [path.name for path in steps_in(tmp_path)] == ["step-00000003"]
