"""What is being written, and what was left when a process ended. Which files those are, their writers say.

[Note: unfinished] Its name ends with the thread and the process that write it, so no two of them write under one name,
nor do two boosters of one process that save beside training. What another process left is removed once that one is
known to be dead: a process of this machine that is gone; or, since machines do not know of each other's processes, one
of elsewhere that has changed nothing in it for longer than ranks wait for each other.
"""

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Ranks wait for each other for six hours, see side_group in cluster/mesh.py; clocks may differ.
_SILENCE = 8 * 3600
_UNKNOWN = "0" * 12  # machine
_OWNED = re.compile(r".*-([0-9a-f]{12})-(\d+)-(\d+)")


def unfinished(path: Path, kind: str = "writing") -> Path:
    """The name beside `path`, of a kind, under which this thread writes; see [Note: unfinished]."""
    return path.with_name(f".{path.name}.{kind}-{threading.get_native_id()}-{owner_of(os.getpid())}")


def unfinished_of_all(path: Path, kind: str = "writing") -> list[Path]:
    """What any process has beside `path` under such a name."""
    beginning = f".{path.name}.{kind}"
    if not path.parent.is_dir():
        return []
    return [each for each in path.parent.iterdir() if each.name.startswith(beginning)]


def make_anew(folder: Path) -> None:
    """Make a folder to write in, without what a save of this thread that failed left there.

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
    """A process of this machine as names have it: machine, number, start; zeros where the system does not tell."""
    return f"{_machine()}-{process}-{_start(process) or 0}"


def _is_abandoned(path: Path) -> bool:
    owned = _OWNED.fullmatch(path.name)
    if owned is not None and owned[1] == _machine() != _UNKNOWN:
        return not _is_alive(int(owned[2]), int(owned[3]))
    return time.time() - _last_change(path) > _SILENCE


def _is_alive(process: int, start: int) -> bool:
    """Whether a process of this machine still runs, and is the one that started then."""
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
    """When a process started, in ticks of the machine; None where it has ended, or the system does not tell."""
    try:
        # "number (name) state parent …", and a name may have spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _last_change(path: Path) -> float:
    """When anything in it changed last; now where it goes meanwhile."""
    try:
        return max(
            max(status.st_mtime, status.st_ctime)
            for status in (each.lstat() for each in (path, *(path.rglob("*") if path.is_dir() else ())))
        )
    except OSError:
        return time.time()
