"""Atomic creation of files and folders: write under a temporary name, flush to disk, rename.

[Note: unfinished] A temporary name ends with the ids of the thread and the process that write the file. So it is
unique, even if two boosters of one process save asynchronously. Temporary files of another process are removed once it
is known to be dead. A process of this machine is dead if it does not run. Processes of other machines are not visible:
one is taken for dead if its files have not changed for longer than ranks wait for each other.

[Note: placing] A save of a model or an optimizer replaces the files of an earlier save in a folder; other files stay.
The new files are written in a subfolder and flushed to disk. Then the subfolder is renamed to `.complete`: from here on
the new save counts. Its files are then moved to their final places one by one. Readers must not find old and new files
together. So the old entry file, by which readers find the others, is removed first, and the new one is placed last.
The next load or save completes an interrupted placing.

[Note: locked] Two runs may save to the same folder at the same time. Each writes under its own temporary names, so they
exclude each other only while files are renamed. The lock is a `flock` on the folder itself: it needs no file, and the
system releases it when the process ends. Some shared file systems cannot lock folders. Then a run may find that the
other one was faster, which is an error.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ..cluster.gathering import on_all_ranks, on_first_rank
from ..cluster.heartbeats import UNKNOWN_MACHINE, machine_id
from .tensor_file import write_small

# Longer than the six hours that ranks wait for each other (side_group in cluster/mesh.py), since clocks may differ.
_SILENCE = 8 * 3600
_OWNER = re.compile(r".*-([0-9a-f]{12})-(\d+)-(\d+)")
# Timeout of the lock, in seconds. Renames are fast, but a slow disk may need long to flush them.
_PATIENCE = 600.0
_FILES = "files"  # temporary names of a save's folder are made from it; no file gets this name itself
_COMPLETE, _PLACING = ".complete", "placing.json"


class Replaced(NamedTuple):
    """The files of a folder that one kind of save replaces.

    Args:
        entries: names of files by which readers find the others; every save has one of them.
        others: name patterns of the other files that an earlier save may have written.
    """

    entries: tuple[str, ...]
    others: tuple[str, ...]


def write_together(
    path: Path, write: Callable[[Path], object], kind: Replaced, group: dist.ProcessGroup
) -> None:
    """Write the files of a save from all ranks, in place of those of an earlier save. Collective over the group.

    Args:
        path: the folder; it is made if it does not exist.
        write: writes the files into a given folder; collective, and fails on all ranks or on none.
        kind: the files that are replaced.
        group: all ranks, on the CPU backend.

    Raises:
        OSError: the save failed; on every rank. The earlier save is unchanged, unless placing had begun: then the next
            load or save completes it.
    """
    with written_beside(lambda: _begin(path), group) as folder:
        write(folder)
        on_first_rank(lambda: _commit(path, folder, kind), group)
    on_first_rank(lambda: finish_placing(path), group)


@contextmanager
def written_beside(begin: Callable[[], Path], group: dist.ProcessGroup) -> Iterator[Path]:
    """Make a temporary folder to write in; the block commits it at its end. Collective over the group.

    Args:
        begin: makes the folder, on the first rank; it is removed if the block fails.
        group: all ranks, on the CPU backend.

    Raises:
        OSError: the folder could not be made, or not all ranks see it; on every rank.
    """
    folder = on_first_rank(begin, group)
    try:
        if not all(on_all_ranks(folder.is_dir, group)):
            raise OSError(f"not all ranks see {folder}: save to a file system that all machines share")
        yield folder
    except BaseException:
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def finish_placing(path: Path) -> None:
    """Move the files of a complete save to their final places, if any are left; see [Note: placing].

    Raises:
        OSError: a file cannot be moved.
    """
    if (path / _COMPLETE).is_dir():
        with locked(path):
            _finish_placing(path)


def _finish_placing(path: Path) -> None:
    """Place the files of a complete save, if there is one, and remove the files that they replace."""
    complete = path / _COMPLETE
    if not complete.is_dir():
        return
    if (complete / _PLACING).exists():  # else all were placed, and only removing the folder was interrupted
        placing = json.loads((complete / _PLACING).read_text())
        entry_file = placing["place"][-1]
        if (complete / entry_file).exists():  # else the entry file in `path` is the new one already
            _remove(path, placing["entries"])
        for name in placing["place"]:
            if (complete / name).exists():
                os.replace(complete / name, path / name)
        _remove(path, placing["remove"])
    shutil.rmtree(complete)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically, in place of an existing one.

    Raises:
        OSError: the write failed; an existing file is unchanged.
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


def _begin(path: Path) -> Path:
    """Complete or clean up earlier saves to a folder; return a new temporary folder in it."""
    finish_placing(path)
    remove_abandoned(unfinished_of_all(path / _FILES))
    folder = unfinished(path / _FILES)
    make_anew(folder)
    return folder


def _commit(path: Path, folder: Path, kind: Replaced) -> None:
    """Make the save in a temporary folder the one that `finish_placing` completes."""
    written = sorted(os.listdir(folder), key=lambda name: (name in kind.entries, name))
    if written[-1] not in kind.entries:
        raise AssertionError(f"{written} has none of {kind.entries}")
    with locked(path):
        _finish_placing(path)  # another run may have saved in the meantime
        _make_complete(path, folder, kind, written)


def _make_complete(path: Path, folder: Path, kind: Replaced, written: list[str]) -> None:
    """Write down which files are placed and removed, then rename the folder; both are flushed to the disk.

    Args:
        path: where the files are placed.
        folder: the temporary folder.
        kind: the files that they replace.
        written: names of the files in the folder, in the order in which they are placed: entries last.
    """
    present = {file.name for pattern in (*kind.entries, *kind.others) for file in path.glob(pattern)}
    placing = {"place": written, "entries": kind.entries, "remove": sorted(present - set(written))}
    write_small(folder / _PLACING, json.dumps(placing).encode())
    sync_folder(folder)
    try:
        os.rename(folder, path / _COMPLETE)
    except OSError as error:
        if not (path / _COMPLETE).exists():
            raise
        raise OSError(
            f"another run saved to {path} at the same time, and its files were kept: give each run its own folder"
        ) from error
    try:
        sync_folder(path)
    except OSError:  # the caller gets an error, so this save must not be completed
        os.rename(path / _COMPLETE, folder)
        raise


def _remove(path: Path, names: list[str]) -> None:
    for name in names:
        (path / name).unlink(missing_ok=True)
    sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(path: Path, kind: str = "writing") -> Path:
    """Return the temporary path of this thread for `path`, in the same folder; see [Note: unfinished]."""
    return path.with_name(f".{path.name}.{kind}-{threading.get_native_id()}-{owner_of(os.getpid())}")


def unfinished_of_all(path: Path, kind: str = "writing") -> list[Path]:
    """Return the temporary paths of all processes for `path`."""
    beginning = f".{path.name}.{kind}"
    if not path.parent.is_dir():
        return []
    return [sibling for sibling in path.parent.iterdir() if sibling.name.startswith(beginning)]


def make_anew(folder: Path) -> None:
    """Make an empty folder; an existing one, left by a failed save of this thread, is removed.

    Raises:
        OSError: the folder cannot be made.
    """
    if folder.exists():
        shutil.rmtree(folder)
    make_folder(folder)


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder and its parents.

    Raises:
        OSError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the folder {folder} cannot be made ({error.strerror}): give a path where this process may write",
        ) from error


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove temporary files and folders of dead processes; errors are ignored."""
    for path in paths:
        if not _is_abandoned(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def owner_of(process: int) -> str:
    """Return the part of a temporary name that identifies a process of this machine: machine, pid and start time.

    Values that the system does not provide are zeros.
    """
    return f"{machine_id()}-{process}-{_start(process) or 0}"


def _is_abandoned(path: Path) -> bool:
    """Return True if the process that writes a temporary file is dead; see [Note: unfinished]."""
    owner = _OWNER.fullmatch(path.name)
    if owner is not None and owner[1] == machine_id() != UNKNOWN_MACHINE:
        return not _is_alive(int(owner[2]), int(owner[3]))
    return time.time() - _last_change(path) > _SILENCE


def _is_alive(process: int, start: int) -> bool:
    """Return True if a process of this machine runs and has this start time."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return _start(process) == start


def _start(process: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it has ended, or on systems without /proc."""
    try:
        # "pid (name) state parent …"; the name may contain spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _last_change(path: Path) -> float:
    """Return the time of the last change in a file or folder; now if it is removed during the check."""
    try:
        inside = path.rglob("*") if path.is_dir() else ()
        statuses = [entry.lstat() for entry in (path, *inside)]
        return max(max(status.st_mtime, status.st_ctime) for status in statuses)
    except OSError:
        return time.time()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder against other processes that rename files in it. Not reentrant; see [Note: locked].

    Raises:
        OSError: the folder cannot be opened, or the lock was not free within the timeout.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_locked = _lock(descriptor, folder)
        try:
            yield
        finally:
            if is_locked:  # closing is not enough: a process forked in the meantime would keep the lock
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    """Wait for the lock; return False if the file system cannot lock folders."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(
                    f"another process has been committing files in {folder} for {_PATIENCE:.0f} s: check whether it "
                    "still runs (fuser shows which it is) and end it, or give another folder"
                ) from None
            time.sleep(0.01)
        except OSError:
            return False
