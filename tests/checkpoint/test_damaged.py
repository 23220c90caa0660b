"""Damage is detected everywhere and named, and the run resumes from an older checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.checkpoint.full_state import choose_step

from ..log_lines import logged
from ..pool import Pool
from .failures import Harm, cut, flip_every_file, harmed
from .runs import SHARD, Run, small_run


def two_steps(directory: Path) -> Run:
    """Make a run with checkpoints of steps 1 and 2, in several files."""
    run = small_run()
    for step in (1, 2):
        run.step(step)
        run.booster.save_checkpoint(directory, step, **run.everything, size_per_shard=SHARD).wait()
    return run


def require_skipped(run: Run, directory: Path, path: Path, place: str) -> None:
    """Require that the older step is chosen, and that the first rank logs the damaged file and its part."""
    with logged("echelon.checkpoint.full_state") as lines:
        chosen = choose_step(directory, "auto", run.booster.plugin.mesh.side_group())
    assert chosen == directory / "step-00000001"
    if dist.get_rank() == 0:
        assert len(lines) == 1 and f"{path}" in lines[0] and place in lines[0], (lines, place)
        assert lines[0].endswith(f"resuming from {chosen} instead")
    else:
        assert lines == []


def skip_every_flip(directory: Path, positions: int) -> int:
    """Flip one bit of the newest step, at some positions of each file, and return their number."""
    run, count = two_steps(directory), 0
    for path, place in flip_every_file(directory / "step-00000002", positions):
        require_skipped(run, directory, path, place)
        count += 1
    assert choose_step(directory, "auto", run.booster.plugin.mesh.side_group()) == directory / "step-00000002"
    return count


def other_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def forget_a_tensor(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["files"].popitem()
    path.write_text(json.dumps(manifest, indent=1))


# A file of a step, its damage, and the error.
HARMS: tuple[tuple[str, Harm, str], ...] = (
    ("model/*-00001-*.safetensors", Path.unlink, "is missing"),
    ("training.pt", Path.unlink, "is missing"),
    ("manifest.json", Path.unlink, "is missing"),
    ("optimizer/index.json", cut, "were written"),
    ("model/*-00001-*.safetensors", cut, "were written"),
    ("manifest.json", cut, "is damaged"),
    ("manifest.json", lambda path: path.write_bytes(b""), "is damaged"),
    ("manifest.json", other_format, "is of format 2 "),
    ("manifest.json", forget_a_tensor, "do not match its own hash"),
)


def skip_damaged_files(directory: Path) -> None:
    """Skip steps with a missing or truncated file, without any file, or of another format."""
    run = two_steps(directory)
    newest = directory / "step-00000002"
    for pattern, harm, why in HARMS:
        (path,) = newest.glob(pattern)
        with harmed(path, harm):
            require_skipped(run, directory, path, why)
            require_refused(run, directory, path)
    for folder in (newest, directory / "step-00000001"):
        resumed = run.booster.load_checkpoint(directory, **run.everything)
        assert resumed is not None and resumed.step == 2 - (folder != newest)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            folder.mkdir()
        dist.barrier()
    require_refused(run, directory, newest, resume="auto")


def require_refused(run: Run, directory: Path, path: Path, resume: int | str = 2) -> None:
    """Require that resuming by number raises an error that names the file, and changes nothing."""
    before = run.unsharded()
    with pytest.raises(ValueError) as error:
        run.booster.load_checkpoint(directory, **run.everything, resume=resume)  # type: ignore[arg-type]
    assert str(path) in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.unsharded().items())


@pytest.mark.parametrize(("positions", "least"), [(1, 14), pytest.param(60, 500, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_named_with_file_and_tensor(
    pool: Pool, tmp_path: Path, positions: int, least: int
) -> None:
    assert pool.run(2, skip_every_flip, tmp_path, positions, timeout=250)[0] >= least


@pytest.mark.slow
def test_missing_or_truncated_files_and_other_formats_are_skipped(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, skip_damaged_files, tmp_path)
