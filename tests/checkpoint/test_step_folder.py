"""The folders of steps: which are removed, and which get their names back."""

import os
import shutil
from pathlib import Path

from echelon.checkpoint.steps import (
    MANIFEST,
    begin_step,
    commit_step,
    keep_newest,
    newest_first,
    recover,
    step_path,
    steps_in,
)


def made(directory: Path, *steps: int) -> None:
    for step in steps:
        step_path(directory, step).mkdir(parents=True)


def saved(directory: Path, step: int) -> None:
    commit_step(begin_step(directory, step), directory, step, {})


def numbers(paths: list[Path]) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in paths]


def test_what_was_just_saved_is_kept_beside_later_steps_that_were_passed_over(tmp_path: Path) -> None:
    made(tmp_path, 50, 100, 150, 200)
    keep_newest(tmp_path, 1, 150)
    assert steps_in(tmp_path) == [step_path(tmp_path, step) for step in (200, 150)]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3)
    keep_newest(tmp_path, 5, 3)
    assert len(steps_in(tmp_path)) == 3
    keep_newest(tmp_path, 2, 3)
    assert steps_in(tmp_path) == [step_path(tmp_path, step) for step in (3, 2)]


def test_a_step_that_was_about_to_be_replaced_gets_its_name_back(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    replaced = tmp_path / ".step-00000007.replaced-of-another-machine"
    step_path(tmp_path, 7).rename(replaced)
    for half_removed in (".step-00000007.replaced", ".step-00000007.replaced-x"):
        (tmp_path / half_removed).mkdir()
    older = tmp_path / ".step-00000007.replaced-older"
    shutil.copytree(replaced, older)
    os.utime(older / MANIFEST, (0, 0))
    recover(tmp_path)
    assert older.exists()
    assert steps_in(tmp_path) == [step_path(tmp_path, 7)] and not replaced.exists()


def test_a_step_that_was_replaced_is_not_brought_back(tmp_path: Path) -> None:
    made(tmp_path, 7)
    replaced = tmp_path / ".step-00000007.replaced"
    (replaced / "old").mkdir(parents=True)
    recover(tmp_path)
    assert not (step_path(tmp_path, 7) / "old").exists()


def test_what_another_run_left_behind_is_not_the_newest(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        saved(tmp_path, step)
    assert numbers(newest_first(tmp_path)) == [12, 9, 6, 3]
    saved(tmp_path, 9)  # having gone on from 6
    assert numbers(newest_first(tmp_path)) == [9, 6, 3, 12]
    saved(tmp_path, 13)
    assert numbers(newest_first(tmp_path)) == [13, 9, 6, 3, 12]
    saved(tmp_path, 12)  # another one, having gone on from 9
    assert numbers(newest_first(tmp_path)) == [12, 9, 6, 3, 13]
    (step_path(tmp_path, 9) / MANIFEST).write_text("damaged")
    assert numbers(newest_first(tmp_path)) == [12, 9, 6, 3, 13]


def test_what_was_left_behind_is_never_kept_in_place_of_what_was_saved_since(tmp_path: Path) -> None:
    for step in (6, 9, 12, 10):
        saved(tmp_path, step)
    keep_newest(tmp_path, 2, 10)
    assert numbers(newest_first(tmp_path)) == [10, 9, 12]  # nothing that is later is removed
    saved(tmp_path, 13)
    keep_newest(tmp_path, 2, 13)
    assert numbers(newest_first(tmp_path)) == [13, 10]


def test_other_folders_are_no_steps(tmp_path: Path) -> None:
    for name in ("step-7", "step-00000007x", ".step-00000007.writing", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    made(tmp_path, 123456789)
    assert steps_in(tmp_path) == [tmp_path / "step-123456789"]
