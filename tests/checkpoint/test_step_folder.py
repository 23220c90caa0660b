"""The folders of steps: which are removed, and which get their names back."""

from pathlib import Path

from echelon.checkpoint.step_folder import keep_newest, recover, step_path, steps_in


def made(directory: Path, *steps: int) -> None:
    for step in steps:
        step_path(directory, step).mkdir(parents=True)


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
    made(tmp_path, 7)
    replaced = tmp_path / ".step-00000007.replaced"
    step_path(tmp_path, 7).rename(replaced)
    recover(tmp_path)
    assert steps_in(tmp_path) == [step_path(tmp_path, 7)] and not replaced.exists()


def test_a_step_that_was_replaced_is_not_brought_back(tmp_path: Path) -> None:
    made(tmp_path, 7)
    replaced = tmp_path / ".step-00000007.replaced"
    (replaced / "old").mkdir(parents=True)
    recover(tmp_path)
    assert not (step_path(tmp_path, 7) / "old").exists()


def test_other_folders_are_no_steps(tmp_path: Path) -> None:
    for name in ("step-7", "step-00000007x", ".step-00000007.writing", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    made(tmp_path, 123456789)
    assert steps_in(tmp_path) == [tmp_path / "step-123456789"]
