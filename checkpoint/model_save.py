"""Where the files of a saved model get their names, once all of them are complete. Writing them is model_files.py."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist

from .consent import on_first_rank
from .model_files import SAFETENSORS, TORCH, FileNames, ModelFiles
from .placing import Replaced, write_together, written_beside
from .step_folder import sync_folder
from .unfinished import make_anew, remove_abandoned, unfinished, unfinished_of_all


def _any_number(names: FileNames) -> str:
    return names.several.replace("{number:05}", "*").replace("{count:05}", "*")


def _weights(prefix: str | None) -> Replaced:
    kinds = [names.with_prefix(prefix) for names in (SAFETENSORS, TORCH)]
    return Replaced(
        entries=tuple(entry for names in kinds for entry in (names.one, names.listing)),
        others=tuple(_any_number(names) for names in kinds),
    )


def write_model_file(files: ModelFiles, path: Path, group: dist.ProcessGroup) -> None:
    """Write a model as one file, which appears under its name once complete. Collective over the group.

    Raises:
        OSError: it could not be written; on every rank. What was there stands.
    """

    def begin() -> Path:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: give the name of a file, or shard=True")
        remove_abandoned(unfinished_of_all(path))
        folder = unfinished(path)
        make_anew(folder)
        return folder

    def place(folder: Path) -> None:
        os.replace(folder / path.name, path)
        sync_folder(path.parent)
        shutil.rmtree(folder, ignore_errors=True)

    with written_beside(begin, group) as folder:
        files.write(folder)
        on_first_rank(lambda: place(folder), group)


def write_model_folder(
    files: ModelFiles, path: Path, group: dist.ProcessGroup, *, prefix: str | None = None
) -> None:
    """Write a model as a folder; what else lies in it stays, weights of an earlier save go. Collective over the group.

    See [Note: placing] in placing.py.

    Args:
        prefix: of the names of its files; those with another one, or none, stay.

    Raises:
        OSError: it could not be written; on every rank. What was there stands.
    """
    write_together(path, files.write, _weights(prefix), group)
