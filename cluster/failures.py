"""Failure detection: report on every waiting rank which rank failed, and why.

A broken collective reports a closed connection, rarely its cause. So every process runs a small thread with its own
connection to the store of the default process group. The thread sends heartbeats, monitors the next rank, and reads
events of ranks that failed, died or left. `naming_failures` around a call that communicates turns the backend's error
into a `RankFailure` that names the failed rank and its error.
"""

import atexit
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from .errors import RankFailure, is_broken, is_timeout
from .profiling import named
from .watch import Watch, default_store

_deferred: list[int] = []  # SIGTERM, in a call that has not ended or ended with an error
_watch: Watch | None = None  # one for each process, as there is one default process group


def start_watch() -> bool:
    """Start the watch over the default process group, if it has more than one rank and is not watched yet.

    Called when a run starts (`launch_from_torch`, the mesh) and by `naming_failures`. Cheap once it is running.
    Accesses the store, and waits for no rank. Return True if the watch was started.
    """
    global _watch
    store = default_store()
    if _watch is not None and _watch.store is store and _watch.process_id == os.getpid():
        return False
    stop_watch()
    if store is None or dist.get_world_size() == 1:
        return False
    _watch = Watch(store)
    atexit.register(stop_watch)
    return True


def stop_watch() -> None:
    """End the watch and report that this rank leaves. The watch ends by itself when the group is destroyed."""
    global _watch
    ended, _watch = _watch, None
    if ended is not None and ended.process_id == os.getpid():  # a fork inherits the variable, not the thread
        atexit.unregister(stop_watch)
        ended.end()


def wait_for_all_ranks(action: str | None = None) -> None:
    """Wait in a watched call, through the store, until all ranks of the world have entered it.

    Args:
        action: a new name of the call, see `rename_call`.

    Raises:
        UnmatchedCall: another rank waits for this one in a different call. Nothing has been sent, so a script that
            handles the error can continue.
        RankFailure: another rank failed, died or left, or did not enter within the group's timeout.
    """
    if action is not None:
        rename_call(action)
    if _watch is not None:
        _watch.wait_for_all()


def raise_if_stuck() -> None:
    """Raise if this rank waits for one that never comes. Polled by everything that waits in Python."""
    if _watch is not None:
        _watch.raise_if_stuck()


def rename_call(action: str) -> None:
    """Rename the watched call, for calls that only some ranks may make; does nothing in a run of one process."""
    if _watch is not None:
        _watch.rename(action)


def note_batch(batch: str, replica: Sequence[int], *, waits: bool = False) -> None:
    """Show the names, shapes and dtypes of this call's batch in the heartbeats; does nothing in a run of one process.

    The watch thread sends the heartbeats, so the step sends no message for it. Ranks of a replica whose batches differ
    may wait for each other inside a collective; the watch then names both.

    Args:
        batch: names, shapes and dtypes.
        replica: the ranks that must have the same.
        waits: wait, by the store, until all of these ranks have noted an equal batch.

    Raises:
        UnmatchedCall: under `waits`, another rank of the replica is in this call with another batch.
    """
    if _watch is not None:
        _watch.here.replica, _watch.here.batch = ",".join(map(str, replica)), batch
        if waits:
            _watch.wait_for_batch(batch, replica)


def note_end_of_data() -> None:
    """Show in the heartbeats that this rank has no more batches, until its next call."""
    if _watch is not None:
        _watch.here.data_ended = _watch.here.calls


def current_call() -> str | None:
    """Name of the watched call that this process is in; None outside of calls, and in a run of one process."""
    return None if _watch is None else _watch.action


@contextmanager
def naming_failures(
    action: str,
    ranks: Sequence[int] | None = None,
    *,
    raised_alike: tuple[type[Exception], ...] = (StopIteration,),
) -> Iterator[None]:
    """Wrap a call that communicates: report this rank's errors to all, and name another rank that failed.

    This rank's own exceptions are reported to the others and pass unchanged. If a connection breaks or a wait times
    out, the error that is raised names the rank that caused it. Also a decorator. Nested uses belong to the outermost.

    Args:
        action: name of the call in messages: "optimizer.step".
        ranks: ranks that must make this call, all equally often. None means all ranks, () only this one.
        raised_alike: errors that all of these ranks raise, so they are no failures: callers compare beforehand. By
            default the end of the data.

    Raises:
        RankFailure: another rank failed, died or left; chained to the backend's error.
        UnmatchedCall: another rank is in a different call, and both wait for each other.
    """
    start_watch()
    watch = _watch
    if watch is None or not watch.enter(action, ranks):
        yield
        return
    with termination_deferred(), named(action):
        try:
            yield
        except raised_alike:
            raise
        except BaseException as error:
            failure = failure_behind(error, action)
            watch.fail(failure or error)
            if failure is None:
                raise
            raise failure from error
        finally:
            watch.leave()


def failure_behind(error: BaseException, action: str) -> RankFailure | None:
    """Find the failure of another rank behind a broken connection or a timeout; wait for its event if necessary.

    Also in other threads than that of the watched call. No communication between ranks.

    Args:
        error: raised by a collective of this rank.
        action: name of the call that raised it.

    Returns:
        The error that names the failed rank, not yet chained; None for other errors, or if the cause is unknown.
    """
    if _watch is None or not (is_broken(error) or is_timeout(error)):
        return None
    return _watch.explain(error, action)


@contextmanager
def all_ranks_in(action: str, **options: Any) -> Iterator[None]:
    """Wrap a call that all ranks make and that may take long: `naming_failures`, and a wait until all have entered it.

    Nothing is sent before, so that no message of training can be mixed up with one of this call.

    Args:
        action: name of the call.
        options: further arguments of `naming_failures`.

    Raises:
        RankFailure, UnmatchedCall: see `naming_failures` and `wait_for_all_ranks`.
    """
    with naming_failures(action, **options):
        wait_for_all_ranks()
        yield


@contextmanager
def termination_deferred() -> Iterator[None]:
    """Defer SIGTERM to the end of the block. A user's own handler is kept.

    An error that leaves the block ends the process, and says more. If the script handles it, the next block ends it.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    if _deferred:
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, _: _deferred.append(number))
    has_ended = False
    try:
        yield
        has_ended = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _deferred and has_ended:
            os.kill(os.getpid(), signal.SIGTERM)
