"""One process at a time where names are given in a folder. Which names, its callers say.

[Note: locked] Two runs may save to one place at one moment. Each writes under names of its own, so only the moment in
which files get their names has to be had by one after the other. The lock is the system's, on the folder itself: no
file lies there for it, and it ends with the process, however that ends. A file system that locks no folders (some that
machines share) leaves the callers without one: then they may find that the other one was faster, which is an error.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Names are given within moments, but a slow disk may take its time to keep them.
_PATIENCE = 600.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Around giving names in a folder, which is there; another one who does waits. Not to be nested.

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
    """Wait for the lock; whether there is one."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(
                    f"another process has been giving files in {folder} their names for {_PATIENCE:.0f} s: see whether "
                    "it still runs (fuser tells which it is), and end it, or give another folder"
                ) from None
            time.sleep(0.01)
        except OSError:
            return False
