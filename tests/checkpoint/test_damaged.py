"""Damage is found wherever it is and named, and an older checkpoint is gone on from."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon.checkpoint.step import choose_step

from ..pool import Pool
from .failures import Harm, cut, flip_every_file, harmed, logged
from .runs import SHARD, Run, small_run

LOADING = "echelon.checkpoint.step"


def two_steps(directory: Path) -> Run:
    """A run with checkpoints of its steps 1 and 2, of several files."""
    run = small_run()
    for step in (1, 2):
        run.step(step)
        run.booster.save_checkpoint(directory, step, **run.everything, size_per_shard=SHARD).wait()
    return run


def pass_over_every_flip(directory: Path, positions: int) -> int:
    """Choose a step with one bit flipped in the newest, at some positions of each file; it has to be named.

    Returns:
        How many were flipped.
    """
    run = two_steps(directory)
    group = run.booster.plugin.mesh.side_group()
    newest, count = directory / "step-00000002", 0
    for path, part in flip_every_file(newest, positions):
        with logged(LOADING) as lines:
            assert choose_step(directory, "auto", group) == directory / "step-00000001"
            _require_named(lines, path, part)
        count += 1
    assert choose_step(directory, "auto", group) == newest
    return count


def whole_harms(directory: Path) -> None:
    """Loading passes over a step that lacks a file, or part of one, or everything, and over one of another format."""
    run = two_steps(directory)
    newest = directory / "step-00000002"
    weights = sorted((newest / "model").glob("*.safetensors"))[0]
    harms: list[tuple[Path, Harm, str]] = [
        (weights, Path.unlink, "is missing"),
        (newest / "training.pt", Path.unlink, "is missing"),
        (newest / "manifest.json", Path.unlink, "is missing"),
        (newest / "optimizer" / "index.json", cut, "bytes were written|were written"),
        (weights, cut, "were written"),
        (newest / "manifest.json", cut, "is damaged"),
        (newest / "manifest.json", lambda path: path.write_bytes(b"") and None, "is damaged"),
        (newest / "manifest.json", _other_format, "is of format 2 "),
        (newest / "manifest.json", _forget_a_tensor, "is not what its own hash says"),
    ]
    for path, harm, why in harms:
        with harmed(path, harm), logged(LOADING) as lines:
            resumed = run.booster.load_checkpoint(directory, **run.everything)
            assert resumed is not None and resumed.step == 1, path
            _require_named(lines, path, why.split("|")[-1])
            _require_refused(run, directory, path)
    _empty(newest)
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None and resumed.step == 1
    _empty(directory / "step-00000001")
    _require_refused(run, directory, newest, resume="auto")


def _require_refused(run: Run, directory: Path, path: Path, resume: int | str = 2) -> None:
    """Asked for by its number it is an error that names the file, and nothing changes."""
    before = run.whole()
    try:
        run.booster.load_checkpoint(directory, **run.everything, resume=resume)  # type: ignore[arg-type]
    except ValueError as error:
        assert str(path) in str(error)
    else:
        raise AssertionError(f"{path} was not missed")
    assert all(bool((tensor == before[name]).all()) for name, tensor in run.whole().items())


def _require_named(lines: list[str], path: Path, part: str) -> None:
    if dist.get_rank() == 0:
        assert len(lines) == 1 and f"{path}" in lines[0] and part in lines[0], (lines, part)
        assert lines[0].endswith(
            f"going on from {path.parents[0 if _is_top(path) else 1].parent}/step-00000001 instead"
        )
    else:
        assert lines == []


def _is_top(path: Path) -> bool:
    return path.parent.name.startswith("step-")


def _other_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def _forget_a_tensor(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["files"].popitem()
    path.write_text(json.dumps(manifest, indent=1))


def _empty(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        folder.mkdir()
    dist.barrier()


def test_one_flipped_bit_is_named_with_file_and_tensor(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, pass_over_every_flip, tmp_path, 1)[0] >= 14


@pytest.mark.slow
def test_what_is_missing_cut_or_of_another_format_is_passed_over(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, whole_harms, tmp_path)


@pytest.mark.slow
def test_a_flipped_bit_is_named_wherever_it_is(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, pass_over_every_flip, tmp_path, 60, timeout=250)[0] >= 500
