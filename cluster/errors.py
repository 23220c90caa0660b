"""Errors: one for all that is wrong with a call, those that another rank causes, and the SIGTERM that follows these."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


class ErrorList(ValueError):
    """All that is wrong with a call: `args` are the errors, of which the text has a line each."""

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join((f"{len(self.args)} errors:", *(f"- {error}" for error in self.args)))


def raise_errors(errors: Sequence[str]) -> None:
    """Raise all errors as one; return where there are none.

    Raises:
        ErrorList: there are some.
    """
    if errors:
        raise ErrorList(*errors)


def errors_of(error: Exception) -> tuple[str, ...]:
    """The errors that were raised as one, or the text of any other error."""
    return error.args if isinstance(error, ErrorList) else (str(error),)


# What gloo says of a peer that is gone; NCCL and the store have error types of their own.
BROKEN = re.compile(
    r"connection (closed by peer|reset by peer|refused)|broken pipe|socket closed|remote worker crashing"
    r"|connectFullMesh failed",
    re.I,
)
TIMED_OUT = re.compile(r"timed out waiting|(wait|operation|application) timeout|operation timed out", re.I)

SAME_CALLS = (  # what to do about an `UnmatchedCall`
    "every rank has to make the same calls in the same order, so make this one on all ranks or on none"
)


class RankFailure(RuntimeError):
    """Another rank failed, died or left while this one waited for it. `rank` is the one to blame, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class UnmatchedCall(RankFailure):
    """This rank is in a call that another one, `rank`, never makes: it is in another call instead."""


def is_broken(error: BaseException) -> bool:
    """Return True if an error says that another rank went away, or that the backend failed."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return True if an error says that another rank did not come."""
    return isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)) is not None


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
