"""Where the files of a saved model get their names, once all of them are complete. Writing them is model_files.py."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from .consent import alike, on_first_rank
from .model_files import SAFETENSORS, TORCH, ModelFiles
from .step_folder import sync_folder


def write_model_file(files: ModelFiles, path: Path, group: dist.ProcessGroup) -> None:
    """Write a model as one file, which appears under its name once complete. Collective over the group.

    Raises:
        OSError: it could not be written; on every rank. What was there stands.
    """

    def place(folder: Path) -> None:
        os.replace(folder / path.name, path)
        sync_folder(path.parent)

    _write_beside(files, path.parent / f".{path.name}.writing", place, group)


def write_model_folder(files: ModelFiles, path: Path, group: dist.ProcessGroup) -> None:
    """Write a model as a folder; what else lies in it stays. Collective over the group.

    Files appear under their names once all are complete, their index last; weights of an earlier save go.

    Raises:
        OSError: it could not be written; on every rank. Where that is before the files got their names, what was there
            stands.
    """
    listings = {SAFETENSORS.listing, TORCH.listing}

    def place(folder: Path) -> None:
        written = sorted(os.listdir(folder), key=lambda name: (name in listings, name))
        for name in written:
            os.replace(folder / name, path / name)
        for left in _weights_in(path) - set(written):
            (path / left).unlink()
        sync_folder(path)

    _write_beside(files, path / ".writing", place, group)


def _write_beside(
    files: ModelFiles, folder: Path, place: Callable[[Path], None], group: dist.ProcessGroup
) -> None:
    """Write into a folder of its own, and let the first rank place what is in it."""

    def begin() -> None:
        if folder.exists():  # what a save that was interrupted left
            shutil.rmtree(folder)
        folder.mkdir(parents=True)

    try:
        on_first_rank(begin, group)
        alike(lambda: require_seen(folder), group)
        files.write(folder)
        on_first_rank(lambda: place(folder), group)
    finally:
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def require_seen(folder: Path) -> None:
    """Refuse a folder that only some ranks see.

    Raises:
        OSError: this one does not.
    """
    if not folder.is_dir():
        raise OSError(
            f"the first rank made {folder}, which is not seen here: save to a file system that all machines share"
        )


def _weights_in(path: Path) -> set[str]:
    """Files of weights, and their indices, that a model's folder has."""
    patterns = [
        names.several.replace("{number:05}", "*").replace("{count:05}", "*") for names in (SAFETENSORS, TORCH)
    ]
    patterns += [name for names in (SAFETENSORS, TORCH) for name in (names.one, names.listing)]
    return {found.name for pattern in patterns for found in path.glob(pattern)}
