"""Files that a save replaces all at once, in a folder where others stay. What is written is the caller's.

[Note: placing] The files are written in a folder of their own below, and brought to the disk. Once all are there that
folder is renamed to `.complete`: from then on the new save is the one that holds. Then its files get their places one
by one. A reader must not find old and new ones together meanwhile: the entry, by which readers find the others, goes
first, and the new one is placed last. What is interrupted there is gone on with by the next load or save. Of two runs
that save to one folder one does all this before the other, whose files then replace its; see [Note: locked].
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .consent import alike, on_first_rank
from .locked import locked
from .step_folder import sync_folder
from .tensor_file import write_small
from .unfinished import make_anew, make_folder, remove_abandoned, unfinished, unfinished_of_all

_FILES, _COMPLETE, _ORDER = "files", ".complete", "placing.json"


class Replaced(NamedTuple):
    """The files of a folder that a kind of save replaces.

    Args:
        entries: names of files by which readers find the others; every save has one of them.
        others: patterns of the names of the rest, as far as an earlier save may have had others of them.
    """

    entries: tuple[str, ...]
    others: tuple[str, ...]


def write_together(
    path: Path, write: Callable[[Path], object], kind: Replaced, group: dist.ProcessGroup
) -> None:
    """Let all ranks write the files of a save, which replace those of an earlier one. Collective over the group.

    Args:
        path: the folder, which is made where there is none.
        write: writes them into the folder that it is given; collective, and fails on all ranks alike.
        kind: what is replaced.

    Raises:
        OSError: it could not be written; on every rank. What was there stands, unless the files were only to get their
            places: then the next load or save gives them these.
    """
    with written_beside(lambda: _begin(path), group) as folder:
        write(folder)
        on_first_rank(lambda: _commit(path, folder, kind), group)
    on_first_rank(lambda: finish_placing(path), group)


@contextmanager
def written_beside(begin: Callable[[], Path], group: dist.ProcessGroup) -> Iterator[Path]:
    """Around writing in a folder that gets its name, or whose files get theirs, at the end. Collective over the group.

    Args:
        begin: makes the folder, on the first rank; it is removed where the block fails.
        group: all ranks, over the CPU.

    Raises:
        OSError: it could not be made, or is not seen by all ranks; on every rank.
    """
    folder = on_first_rank(begin, group)
    try:
        alike(lambda: require_seen(folder), group)
        yield folder
    except BaseException:
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def finish_placing(path: Path) -> None:
    """Give the files of a complete save their places, where that was interrupted; nothing where it was not.

    Raises:
        OSError: it cannot be done.
    """
    if (path / _COMPLETE).is_dir():
        with locked(path):
            _finish_placing(path)


def _finish_placing(path: Path) -> None:
    complete = path / _COMPLETE
    if not complete.is_dir():
        return
    if (complete / _ORDER).exists():  # else all was placed, and removing the folder was interrupted
        order = json.loads((complete / _ORDER).read_text())
        if (complete / order["place"][-1]).exists():
            _remove(path, order["entries"])
        for name in order["place"]:
            if (complete / name).exists():
                os.replace(complete / name, path / name)
        _remove(path, order["remove"])
    shutil.rmtree(complete)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file, which appears under its name, in place of an earlier one, once it is complete.

    Raises:
        OSError: it cannot be written; what was there stands.
    """
    make_folder(path.parent, exist_ok=True)
    remove_abandoned(unfinished_of_all(path))
    written = unfinished(path)
    try:
        write_small(written, content)
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
    sync_folder(path.parent)


def require_seen(folder: Path) -> None:
    """Refuse a folder that only some ranks see.

    Raises:
        OSError: this one does not.
    """
    if not folder.is_dir():
        raise OSError(
            f"the first rank made {folder}, which is not seen here: save to a file system that all machines share"
        )


def _begin(path: Path) -> Path:
    finish_placing(path)
    inside = path / _FILES
    remove_abandoned(unfinished_of_all(inside))
    folder = unfinished(inside)
    make_anew(folder)
    return folder


def _commit(path: Path, folder: Path, kind: Replaced) -> None:
    written = sorted(os.listdir(folder), key=lambda name: (name in kind.entries, name))
    if written[-1] not in kind.entries:
        raise AssertionError(f"{written} has none of {kind.entries}")
    with locked(path):
        _finish_placing(path)  # what another run has saved meanwhile
        _make_complete(path, folder, kind, written)


def _make_complete(path: Path, folder: Path, kind: Replaced, written: list[str]) -> None:
    there = {found.name for pattern in (*kind.entries, *kind.others) for found in path.glob(pattern)}
    order = {"place": written, "entries": kind.entries, "remove": sorted(there - set(written))}
    write_small(folder / _ORDER, json.dumps(order).encode())
    sync_folder(folder)
    try:
        os.rename(folder, path / _COMPLETE)
    except OSError as error:
        if not (path / _COMPLETE).exists():
            raise
        raise OSError(
            f"another run has saved to {path} at this moment, and what it saved stands: give each run a folder of its "
            "own"
        ) from error
    try:
        sync_folder(path)
    except OSError:
        os.rename(path / _COMPLETE, folder)
        raise


def _remove(path: Path, names: list[str]) -> None:
    for name in names:
        (path / name).unlink(missing_ok=True)
    sync_folder(path)
