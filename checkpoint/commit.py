"""Files and folders that appear all at once: written under another name, brought to the disk, renamed.

[Note: unfinished] The name of a file that is being written ends with the thread and the process that write it, so no
two of them write under one name, nor do two boosters of one process that save beside training. The files of another
process are removed once it is known to be dead: a process of this machine that is gone; or, since machines do not know
of each other's processes, one of elsewhere that has changed nothing for longer than ranks wait for each other.

[Note: placing] A save of a model or an optimizer replaces the files of an earlier one in a folder where others stay.
The files are written in a folder below, and brought to the disk. Once all are there that folder is renamed to
`.complete`: from then on the new save holds. Then its files get their places one by one. A reader must not find old and
new ones together meanwhile: the entry, by which readers find the others, goes first, and the new one is placed last.
The next load or save goes on with an interrupted one.

[Note: locked] Two runs may save to one place at one moment. Each writes under names of its own, so only while files get
their names one has to wait for the other. The lock is the system's, on the folder itself: no file lies there for it,
and it ends with the process, however that ends. Some shared file systems lock no folders: then a run may find that the
other one was faster, which is an error.
"""

import fcntl
import hashlib
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

from ..cluster.agree import on_all_ranks, on_first_rank
from .tensor_file import write_small

# Ranks wait for each other for six hours, see side_group in cluster/mesh.py; clocks may differ.
_SILENCE = 8 * 3600
_UNKNOWN = "0" * 12  # machine
_OWNED = re.compile(r".*-([0-9a-f]{12})-(\d+)-(\d+)")
# Names are given within moments, but a slow disk may take its time to keep them.
_PATIENCE = 600.0
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
    """Write in a folder that gets its name, or whose files get theirs, at the end. Collective over the group.

    Args:
        begin: makes the folder, on the first rank; it is removed where the block fails.
        group: all ranks, over the CPU.

    Raises:
        OSError: it could not be made, or is not seen by all ranks; on every rank.
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


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(path: Path, kind: str = "writing") -> Path:
    """The name beside `path`, of a kind, under which this thread writes; see [Note: unfinished]."""
    return path.with_name(f".{path.name}.{kind}-{threading.get_native_id()}-{owner_of(os.getpid())}")


def unfinished_of_all(path: Path, kind: str = "writing") -> list[Path]:
    """The paths of any process beside `path` under such a name."""
    beginning = f".{path.name}.{kind}"
    if not path.parent.is_dir():
        return []
    return [each for each in path.parent.iterdir() if each.name.startswith(beginning)]


def make_anew(folder: Path) -> None:
    """Make a folder to write in, in place of that of a save of this thread that failed.

    Raises:
        OSError: it cannot be made.
    """
    if folder.exists():
        shutil.rmtree(folder)
    make_folder(folder)


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder with those above it.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the folder {folder} cannot be made ({error.strerror}): give a path where this process may write",
        ) from error


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove the files and folders that nobody writes any more; one that cannot be removed stays."""
    for path in paths:
        if not _is_abandoned(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def owner_of(process: int) -> str:
    """A process of this machine in a name: machine, number, start; zeros where the system has none."""
    return f"{_machine()}-{process}-{_start(process) or 0}"


def _is_abandoned(path: Path) -> bool:
    owned = _OWNED.fullmatch(path.name)
    if owned is not None and owned[1] == _machine() != _UNKNOWN:
        return not _is_alive(int(owned[2]), int(owned[3]))
    return time.time() - _last_change(path) > _SILENCE


def _is_alive(process: int, start: int) -> bool:
    """True while a process of this machine runs, and is the one that started then."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return _start(process) == start


def _machine() -> str:
    """This start of this machine, as far as processes know of each other."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256((booted + os.readlink("/proc/self/ns/pid")).encode()).hexdigest()[:12]
    except OSError:
        return _UNKNOWN


def _start(process: int) -> int | None:
    """The start of a process, in ticks of the machine; None where it has ended, or the system has none."""
    try:
        # "number (name) state parent …", and a name may have spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _last_change(path: Path) -> float:
    """The time of the last change in it; now where it goes meanwhile."""
    try:
        return max(
            max(status.st_mtime, status.st_ctime)
            for status in (each.lstat() for each in (path, *(path.rglob("*") if path.is_dir() else ())))
        )
    except OSError:
        return time.time()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Give names in a folder, which is there, while others who do wait. Not to be nested.

    Raises:
        OSError: the folder cannot be opened, or somebody has had it for too long.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_locked = _lock(descriptor, folder)
        try:
            yield
        finally:
            if is_locked:  # by closing alone a process that was forked meanwhile would keep it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    """Wait for the lock; False where there is none."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(
                    f"another process has been giving files in {folder} their names for {_PATIENCE:.0f} s: see whether "
                    "it still runs (fuser says which it is), and end it, or give another folder"
                ) from None
            time.sleep(0.01)
        except OSError:
            return False
