"""Naming the rank that failed on every rank that waits for it. What is exchanged in training is not here.

A broken collective says that a connection closed, hardly ever why. So every process runs a small thread with
a connection of its own to the store of the default process group. It shows that the process lives, looks
after the next rank, and keeps the news of ranks that failed, died or left. `naming_failures` around a call
that communicates turns what the backend says into a `RankFailure` that names the rank and its error.

[Note: the first cause] Where C waits for B and B for A, which died, both get a connection error, C from B.
News of a rank that only failed in consequence is marked as such, so that C names A too.

[Note: end of a stuck process] gloo reports a closed connection at once, but nothing frees a thread that waits
inside NCCL, or in gloo for a process that has failed and lives on. So the thread prints what it learns while
this rank waits, and once a failure has been certain for `STUCK_SECONDS` in the same call it ends the process.

[Note: launchers] torchrun sends SIGTERM to all others as soon as one process has ended, which would end them
before they could say why, and their own end would look like the cause to others. So a process that failed
lingers until the others have read its news, and one that waits for another is ended only after its call.
"""

import atexit
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .board import Board, Event, Sign

INTERVAL_SECONDS = 0.5
SILENT_SECONDS = 10.0
STUCK_SECONDS = 20.0
# How long a rank whose connection broke waits for news of the cause: longer than it takes to notice a silence.
NEWS_SECONDS = SILENT_SECONDS + 4 * INTERVAL_SECONDS
BRIEF_SECONDS = 4 * INTERVAL_SECONDS

# What gloo says of a peer that is gone; NCCL and the store have error types of their own.
_BROKEN = re.compile(
    r"connection (closed by peer|reset by peer|refused)|broken pipe|socket closed|remote worker crashing"
    r"|connectFullMesh failed",
    re.I,
)
_TIMED_OUT = re.compile(r"timed out waiting|(wait|operation|application) timeout|operation timed out", re.I)


class RankFailure(RuntimeError):
    """Another rank failed, died or left while this one waited for it. `rank` is the one to blame, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class _Watch:
    """The thread of one process for one life of the default process group.

    Args:
        store: the store of the group. Its identity tells whether the group is still the same one.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.process_id = os.getpid()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._board = Board(store, self.rank)
        self._reading = threading.Lock()
        self._events: list[Event] = []
        self._store_is_lost = False
        self._stop = threading.Event()
        self._action: str | None = None
        self._calls = 0
        self._entered = 0.0
        self._told = False
        self._has_failed = False
        self._looked_after: tuple[int, Sign | None, float] | None = None
        self._board.show(self._sign())
        self._thread = threading.Thread(target=self._run, name="echelon watch", daemon=True)
        self._thread.start()

    # What the main thread calls.

    def enter(self, action: str) -> bool:
        """Note that a watched call begins. Return False inside of another one, which does the naming."""
        if self._action is not None:
            return False
        if self._has_failed:  # the error was handled: this rank takes part again
            self._has_failed = False
            self._post("recovered")
        self._calls += 1
        self._entered = time.monotonic()
        self._told = False
        self._action = action
        return True

    def leave(self) -> None:
        """Note that the watched call has ended."""
        self._action = None

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one raised."""
        self._has_failed = True
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._post("failed", text[:2000], consequence=isinstance(error, RankFailure))

    def explain(self, error: BaseException, action: str) -> RankFailure | None:
        """What is behind a broken connection or a timeout; waits for the news. None if no one knows."""
        start = time.monotonic()
        self._told = True
        while True:
            self._read()
            cause = self._cause()
            if _is_certain(cause) or self._store_is_lost:
                break
            # A silence may end, and a rank may leave in consequence: better news may be on its way.
            patience = NEWS_SECONDS if cause is None and not _is_timeout(error) else BRIEF_SECONDS
            if time.monotonic() - start > patience:
                break
            time.sleep(INTERVAL_SECONDS / 5)
        return self._failure(action, str(error)) or self._unexplained(error, action)

    def end(self) -> None:
        """Stop the thread, after telling the others that this rank leaves, or with what error it ends."""
        self._stop.set()
        self._thread.join(timeout=2 * SILENT_SECONDS)
        if self._has_failed:  # see [Note: launchers]; and rank 0 may hold the store
            time.sleep(2 * INTERVAL_SECONDS)

    # What the thread does.

    def _run(self) -> None:
        with suppress(RuntimeError):  # every error of a store is one: its server is gone
            while not self._stop.wait(INTERVAL_SECONDS) and _default_store() is self.store:
                self._board.show(self._sign())
                self._read()
                self._look_after_next()
                self._end_if_stuck()
            self._say_goodbye()
            return
        self._store_is_lost = True

    def _sign(self) -> Sign:
        return Sign(beat=time.monotonic_ns(), action=self._action, calls=self._calls)

    def _read(self) -> None:
        """Take in the news. Both threads do, one at a time."""
        with self._reading:
            try:
                self._events += self._board.news()
            except RuntimeError:
                self._store_is_lost = True

    def _look_after_next(self) -> None:
        """Post that the next rank that should be there is gone, or silent, or back."""
        out = {event.rank for event in self._standing() if event.kind != "silent"}
        ranks = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        rank = next((rank for rank in ranks if rank not in out), None)
        if rank is None:
            return
        sign, now = self._board.sign(rank), time.monotonic()
        if sign is None:
            return  # it has not started to watch
        if self._looked_after is None or self._looked_after[:2] != (rank, sign):
            if any(event.rank == rank for event in self._standing()):
                self._board.post(Event(rank=rank, kind="recovered"))
            self._looked_after = rank, sign, now
        if self._board.is_gone(rank):
            self._board.post(Event(rank=rank, kind="gone"))
        elif now - self._looked_after[2] > SILENT_SECONDS and rank not in {e.rank for e in self._standing()}:
            self._board.post(Event(rank=rank, kind="silent"))

    def _end_if_stuck(self) -> None:
        """See [Note: end of a stuck process]. Silence is not certain, and who left may have done its work."""
        action, cause = self._action, self._cause()
        if action is None or cause is None or not _is_certain(cause):
            return
        waited = time.monotonic() - max(self._entered, cause.heard)
        with suppress(OSError, ValueError):  # a standard error that is closed, or is no file
            if not self._told:
                self._told = True
                print(self._failure(action), file=sys.stderr, flush=True)
            if waited > STUCK_SECONDS:
                print(f"rank {self.rank} could not be freed and ends here", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
        if waited > STUCK_SECONDS:
            os._exit(1)

    def _say_goodbye(self) -> None:
        # Set by the interpreter once it has printed an exception that nothing caught.
        error = getattr(sys, "last_value", None)
        if self._has_failed:
            return
        if isinstance(error, BaseException):
            self.fail(error)
        else:
            self._post("left")

    # What both do.

    def _post(self, kind: str, text: str = "", *, consequence: bool = False) -> None:
        with suppress(RuntimeError):  # without a store there is nobody to tell
            self._board.post(Event(rank=self.rank, kind=kind, text=text, consequence=consequence))

    def _standing(self) -> list[Event]:
        """The last event of every rank that is not well, in the order in which they came."""
        last = {event.rank: event for event in self._events}
        return [event for event in self._events if last[event.rank] is event and event.kind != "recovered"]

    def _cause(self) -> Event | None:
        """The event that explains the others. See [Note: the first cause]."""
        candidates = [
            event for event in self._standing() if event.rank != self.rank and not event.consequence
        ]
        return min(candidates, key=lambda event: (not _is_certain(event), event.kind == "left"), default=None)

    def _failure(self, action: str, detail: str = "") -> RankFailure | None:
        cause = self._cause()
        here = f"this rank ({self.rank}) was waiting for it in {action}"
        if detail.startswith("lost rank"):  # the pipeline's own words: which stage, which microbatch
            here += f" ({detail.partition(': ')[0]})"
        if cause is not None:
            return RankFailure(f"{cause}; {here}", cause.rank)
        if self._store_is_lost:
            return RankFailure(f"the store is gone, which rank 0 or its launcher holds; {here}", 0)
        return None

    def _unexplained(self, error: BaseException, action: str) -> RankFailure | None:
        if not _is_timeout(error) or self._store_is_lost:
            return None
        with suppress(RuntimeError):
            others = [
                f"rank {rank} {self._board.sign(rank) or 'unknown'}"
                for rank in range(min(self.world_size, 64))
                if rank != self.rank
            ]
            return RankFailure(
                f"rank {self.rank} waited in vain in {action} (call {self._calls}) and no rank has failed; "
                f"last seen: {', '.join(others)}"
            )
        return None


_watch: _Watch | None = None  # of this process: it has one default process group, hence one watch


def start_watch() -> None:
    """Start the watch over the default process group, if it has more than one rank and is not watched yet.

    Called where a run starts (`launch_from_torch`, the mesh) and by `naming_failures`; costs a comparison
    once it is running. Talks to the store, waits for nobody.
    """
    global _watch
    store = _default_store()
    if _watch is not None and _watch.store is store and _watch.process_id == os.getpid():
        return
    stop_watch()
    if store is not None and dist.get_world_size() > 1:
        _watch = _Watch(store)
        atexit.register(stop_watch)


def stop_watch() -> None:
    """End the watch and tell the others that this rank leaves. Ends by itself when the group is destroyed."""
    global _watch
    ended, _watch = _watch, None
    if ended is not None and ended.process_id == os.getpid():  # a fork inherits the variable, not the thread
        atexit.unregister(stop_watch)
        ended.end()


@contextmanager
def naming_failures(action: str) -> Iterator[None]:
    """Around a call that communicates: an error of this rank is told to all, one of another rank is named.

    An exception of this rank's own passes unchanged, once the others have been told. When the connection to
    another rank breaks, or the wait for it times out, what is raised names the rank that is the cause. Serves
    as a decorator too. Nested uses count as the outermost.

    Args:
        action: what is being done, as the messages shall say it: "optimizer.step".

    Raises:
        RankFailure: another rank failed, died or left; chained to what the backend raised.
    """
    start_watch()
    watch = _watch
    if watch is None or not watch.enter(action):
        yield
        return
    with _termination_deferred():
        try:
            yield
        except StopIteration:  # the data ended, which is no failure; who needs more of it compares beforehand
            raise
        except BaseException as error:
            failure = watch.explain(error, action) if _is_broken(error) or _is_timeout(error) else None
            watch.fail(failure or error)
            if failure is None:
                raise
            raise failure from error
        finally:
            watch.leave()


def _default_store() -> dist.Store | None:
    """The store of the default process group, the same object for as long as the group lives. Private to torch."""
    try:
        return distributed_c10d._get_default_store() if dist.is_initialized() else None
    except (ValueError, KeyError):  # another thread is destroying the group
        return None


@contextmanager
def _termination_deferred() -> Iterator[None]:
    """Do not end by SIGTERM before the block does. See [Note: launchers]; a user's own handler stays as it is."""
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


def _is_certain(cause: Event | None) -> bool:
    """Whether it is known that the rank will not come back."""
    return cause is not None and cause.kind in ("failed", "gone")


def _is_broken(error: BaseException) -> bool:
    """Whether the error says that another rank went away, or that the backend failed."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def _is_timeout(error: BaseException) -> bool:
    """Whether the error says that another rank did not come."""
    return isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)) is not None
