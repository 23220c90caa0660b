"""Checkpoints that are damaged on purpose, and what loading says of them, on the ranks of a pool."""

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from echelon.checkpoint.step import choose_step

from .crashes import SHARD, small_run
from .runs import Run

LOADING = "echelon.checkpoint.step"
Harm = Callable[[Path], None]


@contextmanager
def told(logger: str) -> Iterator[list[str]]:
    """What is logged within it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)


def two_steps(directory: Path) -> Run:
    """A run with checkpoints of its steps 1 and 2, of several files."""
    run = small_run()
    for step in (1, 2):
        run.step(step)
        run.booster.save_checkpoint(directory, step, **run.everything, size_per_shard=SHARD).wait()
    return run


def flip_every_file(directory: Path, positions: int) -> int:
    """Flip one bit in every file of the newest step, at some positions each; every time it has to be named.

    Returns:
        How many were flipped.
    """
    run = two_steps(directory)
    group = run.booster.plugin.mesh.side_group()
    newest = directory / "step-00000002"
    draw, count = random.Random(1), 0
    files = [(path, path.stat().st_size) for path in sorted(newest.rglob("*")) if path.is_file()]
    dist.barrier()
    for path, size in files:
        for at in sorted({draw.randrange(size) for _ in range(positions)}):
            with _changed(path, lambda path, at=at: _flip(path, at)), told(LOADING) as lines:  # type: ignore[misc]
                assert choose_step(directory, "auto", group) == directory / "step-00000001"
                _require_named(lines, path, _part_at(path, at))
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
        (newest / "optimizer" / "index.json", _cut, "bytes were written|were written"),
        (weights, _cut, "were written"),
        (newest / "manifest.json", _cut, "is damaged"),
        (newest / "manifest.json", lambda path: path.write_bytes(b"") and None, "is damaged"),
        (newest / "manifest.json", _other_format, "is of format 2 "),
        (newest / "manifest.json", _forget_a_tensor, "is not what its own hash says"),
    ]
    for path, harm, why in harms:
        with _changed(path, harm), told(LOADING) as lines:
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


def _part_at(path: Path, at: int) -> str:
    """The tensor that a byte of a file belongs to; read from a sound one of the same content."""
    if path.suffix != ".safetensors":
        return "damaged"
    content = path.with_name(f"{path.name}.sound").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    if at < header:
        return "the header"
    places = json.loads(content[8:header])
    places.pop("__metadata__")
    return next(
        name
        for name, each in places.items()
        if each["data_offsets"][0] <= at - header < each["data_offsets"][1]
    )


@contextmanager
def _changed(path: Path, harm: Harm) -> Iterator[None]:
    """The first rank harms a file, and gives it back."""
    sound = path.with_name(f"{path.name}.sound")
    if dist.get_rank() == 0:
        shutil.copy(path, sound)
        harm(path)
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        sound.replace(path)
    dist.barrier()


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


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
