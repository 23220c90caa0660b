"""What is being written is removed by nobody but its writer, until that one is dead."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from echelon.checkpoint import commit as module
from echelon.checkpoint.commit import make_anew, owner_of, remove_abandoned, replace_file, unfinished
from echelon.checkpoint.steps import begin_step, commit_step, steps_in


@pytest.fixture
def other() -> Iterator[subprocess.Popen]:
    """Another process of this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def written(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"half")
    return folder


def aged(folder: Path, hours: float) -> mock._patch:
    """As if it were so much later, as far as what is abandoned is concerned."""
    assert folder.exists()
    then = time.time() + hours * 3600
    return mock.patch.object(module.time, "time", lambda: then)


def test_a_step_that_a_living_run_writes_stays_and_gets_its_name(
    tmp_path: Path, other: subprocess.Popen
) -> None:
    name = f".step-00000009.writing-{owner_of(other.pid)}"
    theirs = written(tmp_path / name)
    with aged(theirs, 100):  # it may be stopped, and go on
        commit_step(begin_step(tmp_path, 9), tmp_path, 9, {})
        commit_step(begin_step(tmp_path, 10), tmp_path, 10, {})
    assert (theirs / "weights").read_bytes() == b"half"
    commit_step(theirs, tmp_path, 9, {})
    assert [path.name for path in steps_in(tmp_path)] == ["step-00000010", "step-00000009"]
    assert (tmp_path / "step-00000009" / "weights").exists()


@pytest.mark.parametrize("reaped", (True, False))
def test_what_a_dead_process_left_is_removed(tmp_path: Path, other: subprocess.Popen, reaped: bool) -> None:
    owner = owner_of(other.pid)
    left = [written(tmp_path / f".step-00000009.{kind}-{owner}") for kind in ("writing", "removed")]
    left += [
        written(tmp_path / "model" / f".files.writing-{owner}"),
        written(tmp_path / f".s.pt.writing-{owner}"),
    ]
    other.kill()
    if reaped:
        other.wait()
    else:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    begin_step(tmp_path, 3)
    replace_file(tmp_path / "s.pt", b"new")
    remove_abandoned([left[2]])
    assert not any(path.exists() for path in left)


def test_another_process_of_the_same_number_is_another(tmp_path: Path, other: subprocess.Popen) -> None:
    machine, process, start = owner_of(other.pid).split("-")
    left = written(tmp_path / f".step-00000009.writing-{machine}-{process}-{int(start) - 1}")
    begin_step(tmp_path, 3)
    assert not left.exists()


@pytest.mark.parametrize("owner", ("0123456789ab-1-1", "000000000000-1-0", "who-knows", ""))
def test_of_another_machine_only_what_was_silent_for_long_is_removed(tmp_path: Path, owner: str) -> None:
    left = written(tmp_path / f".step-00000009.writing-{owner}")
    with aged(left, 7):
        begin_step(tmp_path, 3)
    assert left.exists()
    with aged(left, 9):
        begin_step(tmp_path, 3)
    assert not left.exists()


def test_a_file_that_was_written_lately_keeps_its_folder(tmp_path: Path) -> None:
    left = written(tmp_path / ".step-00000009.writing-0123456789ab-1-1")
    late = time.time() + 7 * 3600
    os.utime(left / "weights", (late, late))
    with aged(left, 9):
        begin_step(tmp_path, 3)
    assert left.exists()


def test_where_the_system_tells_nothing_of_processes_age_alone_counts(tmp_path: Path) -> None:
    with (
        mock.patch.object(module, "_machine", lambda: "0" * 12),
        mock.patch.object(module, "_start", lambda _: None),
    ):
        left = written(unfinished(tmp_path / "step-00000009"))
        assert left.name.endswith(f"-000000000000-{os.getpid()}-0")
        remove_abandoned([left])
        assert left.exists()
        with aged(left, 9):
            remove_abandoned([left])
        assert not left.exists()


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "folder"
    told = rf"the folder {re.escape(str(place))} cannot be made \(Not a directory\): give a path where"
    with pytest.raises(NotADirectoryError, match=told):
        make_anew(place)
