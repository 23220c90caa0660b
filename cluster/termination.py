"""Deferring SIGTERM, by which a launcher ends the processes of a run; see [Note: launchers] in faults.py."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def termination_deferred() -> Iterator[None]:
    """Do not end by SIGTERM before the block does. A user's own handler stays as it is."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came and sys.exc_info()[0] is None:  # an error that passes ends the process, and says more
            os.kill(os.getpid(), signal.SIGTERM)
