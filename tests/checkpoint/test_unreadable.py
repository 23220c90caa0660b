"""What may not be read, or is not seen by a rank, is no damage: it is told as what it is, and not passed over."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from echelon.checkpoint.step import choose_step
from echelon.checkpoint.tensor_file import read_values, write_values
from echelon.cli.main import app

from ..examples.scripts import EXAMPLES, load
from ..pool import Pool
from .handmade import Handmade, small_config

NOBODY = 65534


@contextmanager
def denied(path: Path) -> Iterator[None]:
    """For the block this process may not look into a folder, whoever runs it: root becomes a user that may not."""
    user, mode = os.geteuid(), path.stat().st_mode
    path.chmod(0o700 if user == 0 else 0)
    if user == 0:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if user == 0:
            os.setresuid(0, 0, 0)
        path.chmod(mode)


def chosen(directory: Path, step: Path) -> list[str]:
    """What is told where the last rank may not read a step, and where it does not see it."""
    group, is_last = dist.group.WORLD, dist.get_rank() == dist.get_world_size() - 1
    assert group is not None
    told = []
    not_read = mock.patch(
        "echelon.checkpoint.step.manifest_of", side_effect=PermissionError(13, "not for you")
    )
    not_seen = mock.patch.object(Path, "is_dir", lambda path: path != step)
    for harm in (not_read, not_seen):
        with harm if is_last else mock.MagicMock(), pytest.raises(OSError) as error:
            # Only of the ranks together is it so: the first one has found the step.
            choose_step(directory, "auto", group)
        told.append(str(error.value))
    return told


def test_a_step_that_a_rank_may_not_read_or_does_not_see_is_not_passed_over(
    pool: Pool, tmp_path: Path
) -> None:
    made = Handmade.of(small_config())
    for made.step in (1, 2):
        newer = made.write(tmp_path)
    for not_read, not_seen in pool.run(2, chosen, tmp_path, newer):
        assert "not for you" in not_read and "step-00000002, which may be sound" in not_read
        assert not_read.endswith("(rank 1)") and "Remove" not in not_read
        assert not_seen.startswith(
            f"{newer} is not seen here: load from a file system that all machines share"
        )


def test_values_that_may_not_be_read_are_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_values(path, {"a": 1})
    assert read_values(path) == {"a": 1}
    with pytest.raises(IsADirectoryError):
        read_values(tmp_path)
    with denied(tmp_path), pytest.raises(PermissionError):
        read_values(path)


@pytest.mark.parametrize("content", (b"x", b"", b"PK\x03\x04"))
def test_what_is_no_file_of_values_is_refused_without_advice_to_run_its_code(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_values(path)
    assert str(error.value).startswith(f"{path} cannot be read, it is damaged or no file of Echelon's: ")
    assert "weights_only" not in str(error.value)


def test_verify_tells_what_it_may_not_read_and_judges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Handmade.of(small_config()).write(tmp_path)
    monkeypatch.setattr("echelon.checkpoint.steps.hash_of", mock.Mock(side_effect=PermissionError("no")))
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(folder)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "echelon checkpoint verify: no\n"


def test_examples_refuse_folders_that_they_may_not_look_into(tmp_path: Path) -> None:
    saving = load(EXAMPLES / "saving.py")
    for path in (tmp_path, tmp_path / "below" / "it"):
        arguments = mock.Mock(save_dir=path, save_model=path, resume=None, save_every=1, keep_last=None)
        with denied(tmp_path):
            faults = saving.saving_faults(arguments)
        assert [fault.partition(" ")[0] for fault in faults] == ["--save_dir", "--save_model"]
