"""Folders of steps and models are placed atomically, beside concurrent writers and files of dead processes."""

import errno
import fcntl
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from echelon.checkpoint import commit as module
from echelon.checkpoint.commit import (
    finish_placing,
    locked,
    make_anew,
    owner_of,
    remove_abandoned,
    replace_file,
    unfinished,
)
from echelon.checkpoint.step_folders import (
    MANIFEST,
    begin_step,
    commit_step,
    keep_newest,
    newest_first,
    recover,
    step_path,
    steps_in,
)
from echelon.checkpoint.tensor_file import write_small

from .failures import in_warm_process, run_ranks
from .runs import small_run

WRITING = ".step-00000009.writing-"


def saved(directory: Path, *steps: int) -> None:
    for step in steps:
        commit_step(begin_step(directory, step), directory, step, {})


def newest(directory: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in newest_first(directory)]


# Saves of steps, `keep_last` of the last save, and the remaining steps, the newest first.
KEPT = {
    "all": ((3, 6, 9, 12), 9, (12, 9, 6, 3)),
    "the newest": ((1, 2, 3), 2, (3, 2)),
    "what was left behind is not the newest": ((3, 6, 9, 12, 9), 9, (9, 6, 3, 12)),
    "what was saved since is": ((3, 6, 9, 12, 9, 13), 9, (13, 9, 6, 3, 12)),
    "another one of the same number, too": ((3, 6, 9, 12, 9, 13, 12), 9, (12, 9, 6, 3, 13)),
    "of what was left behind nothing is removed": ((50, 100, 200, 150), 1, (150, 200)),
    "until it is older": ((6, 9, 12, 10, 13), 2, (13, 10)),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_newest_are_those_that_were_saved_last_and_are_kept(tmp_path: Path, name: str) -> None:
    steps, count, expected = KEPT[name]
    saved(tmp_path, *steps)
    (tmp_path / "step-00000008").write_text("a file")
    for other in ("step-7", "step-00000007x", ".step-00000007.writing"):
        (tmp_path / other).mkdir()
    keep_newest(tmp_path, count, steps[-1])
    assert tuple(newest(tmp_path)) == expected
    (step_path(tmp_path, expected[-1]) / MANIFEST).write_text("damaged")
    assert set(newest(tmp_path)) == set(expected)


# Changes that leave a folder of a step that cannot be loaded, as an interrupted copy or removal does.
INCOMPLETE: dict[str, Callable[[Path], None]] = {
    "without a manifest": lambda step: (step / MANIFEST).unlink(),
    "with half of a manifest": lambda step: os.truncate(step / MANIFEST, 40),
    "with an empty manifest": lambda step: os.truncate(step / MANIFEST, 0),
    "without a file": lambda step: (step / "weights").unlink(),
    "with half of a file": lambda step: os.truncate(step / "weights", 2),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_steps_do_not_count_and_stay_while_they_are_among_the_newest(
    tmp_path: Path, name: str
) -> None:
    def save(step: int) -> list[int]:
        folder = begin_step(tmp_path, step)
        commit_step(folder, tmp_path, step, {"weights": write_small(folder / "weights", b"1234")})
        keep_newest(tmp_path, 2, step)
        return newest(tmp_path)

    assert [*map(save, (4, 6, 9))][-1] == [9, 6]
    INCOMPLETE[name](step_path(tmp_path, 9))
    assert save(11) == [11, 9, 6]
    assert save(12) == [12, 11]


def test_a_leftover_that_is_newer_does_not_count(tmp_path: Path) -> None:
    step_path(tmp_path, 9).mkdir()
    for step in (4, 6, 11):
        saved(tmp_path, step)
        keep_newest(tmp_path, 2, step)
    assert newest(tmp_path) == [11, 9, 6]


@pytest.mark.parametrize(
    ("link", "target", "expected"),
    [(16, 7, [20, 16, 7]), (5, 7, [20, 7]), (7, 4, [20, 7, 4])],
    ids=["before its step", "after its step", "in place of a later step"],
)
def test_a_link_and_its_step_count_as_one(
    tmp_path: Path, link: int, target: int, expected: list[int]
) -> None:
    saved(tmp_path, *({4, 7} - {link}))
    step_path(tmp_path, link).symlink_to(step_path(tmp_path, target).name)
    saved(tmp_path, 20)
    keep_newest(tmp_path, 2, 20)
    assert newest(tmp_path) == expected
    saved(tmp_path, 21)
    keep_newest(tmp_path, 1, 21)
    assert newest(tmp_path) == [21] and not any(path.is_symlink() for path in tmp_path.iterdir())


def test_a_step_is_complete_if_older_ones_cannot_be_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with (
        mock.patch("os.rename", side_effect=PermissionError("not yours")),
        pytest.raises(OSError, match=r"step-00000002 is complete, and older .* not be removed: not yours"),
    ):
        keep_newest(tmp_path, 1, 2)


def test_a_step_that_was_about_to_be_replaced_gets_its_name_back_and_no_other(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    left = tmp_path / ".step-00000007.replaced-of-another-machine"
    older = tmp_path / ".step-00000007.replaced-older"
    step_path(tmp_path, 7).rename(left)
    for half_removed in (".step-00000007.replaced", ".step-00000007.replaced-x"):
        (tmp_path / half_removed).mkdir()
    shutil.copytree(left, older)
    os.utime(older / MANIFEST, (0, 0))
    recover(tmp_path)
    assert newest(tmp_path) == [7] and older.exists() and not left.exists()
    recover(tmp_path)
    assert newest(tmp_path) == [7] and older.exists()


@pytest.fixture
def other() -> Iterator[subprocess.Popen]:
    """Start another process on this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def half_written(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"half")
    return folder


def aged(hours: float) -> Any:
    """Advance the clock by which abandoned files are recognized."""
    then = time.time() + hours * 3600
    return mock.patch.object(module.time, "time", lambda: then)


def test_a_step_that_a_living_run_writes_stays_and_gets_its_name(
    tmp_path: Path, other: subprocess.Popen
) -> None:
    theirs = half_written(tmp_path / f"{WRITING}{owner_of(other.pid)}")
    with aged(100):  # a stopped process may continue later
        saved(tmp_path, 9, 10)
    assert (theirs / "weights").read_bytes() == b"half"
    commit_step(theirs, tmp_path, 9, {})
    assert (tmp_path / "step-00000009" / "weights").exists()


@pytest.mark.parametrize("end", ["reaped", "a zombie", "another of its number"])
def test_files_of_a_dead_process_are_removed(tmp_path: Path, other: subprocess.Popen, end: str) -> None:
    owner = owner_of(other.pid)
    if end == "another of its number":
        machine, process, start = owner.split("-")
        owner = f"{machine}-{process}-{int(start) - 1}"
    else:
        other.kill()
        other.wait() if end == "reaped" else os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    names = (f"{WRITING}{owner}", f".step-00000009.removed-{owner}", f".s.pt.writing-{owner}")
    left = [half_written(tmp_path / name) for name in (*names, f"model/.files.writing-{owner}")]
    begin_step(tmp_path, 3)
    replace_file(tmp_path / "s.pt", b"new")
    remove_abandoned(left[3:])
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("owner", ("0123456789ab-1-1", "000000000000-1-0", "who-knows", "", "me"))
def test_files_of_an_unknown_process_are_removed_after_a_long_silence(tmp_path: Path, owner: str) -> None:
    if owner == "me":  # on a system without /proc
        with mock.patch.multiple(module, machine_id=lambda: "0" * 12, _start=lambda _: None):
            owner = unfinished(tmp_path / "x").name.rpartition("writing-")[2]
        assert owner.endswith(f"-000000000000-{os.getpid()}-0")
    left, lately = (half_written(tmp_path / f".step-0000000{step}.writing-{owner}") for step in (8, 9))
    late = time.time() + 7 * 3600
    os.utime(lately / "weights", (late, late))
    for hours, is_left in ((7, True), (9, False)):
        with aged(hours):
            begin_step(tmp_path, 3)
        assert (left.exists(), lately.exists()) == (is_left, True)


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "folder"
    expected = rf"the folder {re.escape(str(place))} cannot be made \(Not a directory\): give a path where"
    with pytest.raises(NotADirectoryError, match=expected):
        make_anew(place)


# Two runs that save to one folder at the same time: the later save replaces the earlier one completely.

SAVES = 12
RUNS = (1, 2)


def save_often(place: Path, number: int) -> None:
    """Save a run whose weights all equal its number; each run has files of another size."""
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
    """Load the folders and check that all weights are of one run."""
    run = small_run()
    run.booster.load_model(run.model, place / "model")
    run.booster.load_optimizer(run.optimizer, place / "optimizer")
    assert len({value for weight in run.model.parameters() for value in weight.unique().tolist()}) == 1
    assert run.booster.load_checkpoint(place / "steps", model=run.model) is not None
    assert len({value for weight in run.model.parameters() for value in weight.unique().tolist()}) == 1


@pytest.mark.slow
def test_the_later_of_two_runs_replaces_the_earlier_completely(tmp_path: Path) -> None:
    in_warm_process(save_in_two_runs, tmp_path, seconds=120)
    for folder in (tmp_path / "model", tmp_path / "steps" / "step-00000003" / "model"):
        files = list(folder.glob("*.safetensors"))
        assert {path.name.rpartition("-of-")[2] for path in files} == {f"{len(files):05}.safetensors"}
        assert len({float(tensor.max()) for path in files for tensor in load_file(path).values()}) == 1
    for folder in tmp_path, tmp_path / "model", tmp_path / "optimizer", tmp_path / "steps":
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_placing_waits_for_the_lock_of_another_process(tmp_path: Path) -> None:
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


def test_a_lock_is_not_kept_by_a_forked_process_and_is_waited_for_a_while(tmp_path: Path) -> None:
    kept = []
    original = os.open

    def opened(*args: Any) -> int:
        descriptor = original(*args)
        kept.append(os.dup(descriptor))  # as a process has that is forked now
        return descriptor

    with mock.patch.object(os, "open", opened), locked(tmp_path):
        pass
    with mock.patch.object(module, "_PATIENCE", 0.0), locked(tmp_path):
        expected = f"another process has been committing files in {tmp_path} for 0 s"
        with pytest.raises(OSError, match=expected), locked(tmp_path):
            pass
    for descriptor in kept:
        os.close(descriptor)


def test_saving_works_without_locks_of_the_file_system(tmp_path: Path) -> None:
    refused = OSError(errno.EOPNOTSUPP, "not supported")
    with mock.patch.object(fcntl, "flock", side_effect=refused):
        saved(tmp_path, 3)
    assert newest(tmp_path) == [3]
