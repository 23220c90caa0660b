"""Errors: a list of errors raised as one, failures of other ranks, and deferred SIGTERM."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


class ErrorList(ValueError):
    """Several errors of one call: `args` holds them, and the text has one line for each."""

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join((f"{len(self.args)} errors:", *(f"- {error}" for error in self.args)))


def raise_errors(errors: Sequence[str]) -> None:
    """Raise all errors as one `ErrorList`; return if there are none.

    Raises:
        ErrorList: the list is not empty.
    """
    if errors:
        raise ErrorList(*errors)


def errors_of(error: Exception) -> tuple[str, ...]:
    """The texts of an `ErrorList`, or the text of any other error."""
    return error.args if isinstance(error, ErrorList) else (str(error),)


# gloo's messages about a lost peer; NCCL and the store have error types of their own.
BROKEN = re.compile(
    r"connection (closed by peer|reset by peer|refused)|broken pipe|socket closed|remote worker crashing"
    r"|connectFullMesh failed",
    re.I,
)
TIMED_OUT = re.compile(r"timed out waiting|(wait|operation|application) timeout|operation timed out", re.I)

SAME_CALLS = (  # advice of an `UnmatchedCall`
    "every rank must make the same calls in the same order, so make this call on all ranks or on none"
)


class RankFailure(RuntimeError):
    """Another rank failed, died or left while this one waited for it. `rank` is the failed rank, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class UnmatchedCall(RankFailure):
    """This rank waits in a call that `rank` never makes, because `rank` waits in another call."""


def is_broken(error: BaseException) -> bool:
    """Return True if an error reports a lost connection to another rank, or a failure of the backend."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return True if an error reports a timeout."""
    return isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)) is not None


@contextmanager
def termination_deferred() -> Iterator[None]:
    """Defer SIGTERM to the end of the block. A user's own handler is kept."""
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
        if came and sys.exc_info()[0] is None:  # an error in flight ends the process, and is more informative
            os.kill(os.getpid(), signal.SIGTERM)
