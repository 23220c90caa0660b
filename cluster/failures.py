"""Naming the rank that failed on every rank that waits for it. What is exchanged in training is not here.

A broken collective says that a connection closed, hardly ever why. So every process runs a small thread with
a connection of its own to the store of the default process group. It shows that the process lives, looks
after the next rank, and keeps the news of ranks that failed, died or left. `naming_failures` around a call
that communicates turns what the backend says into a `RankFailure` that names the rank and its error.

[Note: the first cause] Where C waits for B and B for A, which died, both get a connection error, C from B.
News of a rank that only failed in consequence is marked as such, so that C names A too.

[Note: errors that all ranks have] A rank that failed, but no more often than this one, may handle its errors as this
one did, and be late in the next call. Its news names it, and ends nobody.

[Note: a call that others do not make] After `WAITING_SECONDS` in a call that a rank has not come to, one line says
who waits for whom. Where the heartbeats make certain that they never meet, or that the rank has left, the call raises:
at once where it waits in Python (`meet_all_ranks`, a gathering of small numbers), since that asks `raise_if_in_vain`
again and again. A thread in another wait of gloo or NCCL cannot be freed, see below.

[Note: end of a stuck process] gloo reports a closed connection at once, but nothing frees a thread that waits
inside NCCL, or in gloo for a process that has failed and lives on. So the thread prints what it learns while
this rank waits, and once a failure has been certain for `STUCK_SECONDS` in the same call it ends the process. Outside
of calls, where a script may wait for its GPU (`loss.item()`) or do work of its own, and of a rank that is silent, it
says so, and ends nothing.

[Note: launchers] torchrun sends SIGTERM to all others as soon as one process has ended, which would end them
before they could say why, and their own end would look like the cause to others. So a process that failed
lingers until the others have read its news, and one that waits for another is ended only after its call.
"""

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch.distributed as dist

from .errors import SAME_CALLS, RankFailure, UnmatchedCall, is_broken, is_timeout, termination_deferred
from .heartbeats import (
    KEPT,
    Board,
    Call,
    Event,
    Heartbeat,
    absent_ranks,
    default_store,
    default_timeout,
    members,
    never_meeting,
    places,
)

INTERVAL_SECONDS = 0.5
SILENT_SECONDS = 10.0
STUCK_SECONDS = 20.0
WAITING_SECONDS = 30.0
LOOK_SECONDS = 1.0  # between two looks at the other ranks, per 64 of them
_POLL_SECONDS = 0.02
# How long a rank whose connection broke waits for news of the cause: longer than it takes to notice a silence.
NEWS_SECONDS = SILENT_SECONDS + 4 * INTERVAL_SECONDS
BRIEF_SECONDS = 4 * INTERVAL_SECONDS


class _Watch:
    """The thread of one process for one life of the default process group.

    Args:
        store: the store of the group. Another one means another group.
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
        self._here = Heartbeat(beat=0, action=None, calls=0)
        self._call: Call | None = None
        self._has_failed = False
        self._own_errors = self._meetings = 0
        self._told: Event | None = None  # outside of calls
        self._looked_after: tuple[int, Heartbeat | None, float] | None = None
        self._looked = 0.0
        self._given_up = ""
        self._board.show(self._heartbeat())
        self._thread = threading.Thread(target=self._run, name="echelon watch", daemon=True)
        self._thread.start()

    def enter(self, action: str, ranks: Sequence[int] | None) -> bool:
        """Note that a watched call begins. Return False inside of another one, which does the naming."""
        if self._call is not None:
            return False
        if self._given_up:
            raise RuntimeError(
                f"{action} cannot run, since an earlier call was given up while other ranks were elsewhere: start the "
                f"processes again. It was: {self._given_up}"
            )
        if self._has_failed:  # the error was handled: this rank takes part again
            self._has_failed = False
            self._post("recovered")
        here, ranks = self._here, range(self.world_size) if ranks is None else ranks
        here.calls += 1
        here.group = ",".join(map(str, ranks)) if len(ranks) > 1 else ""
        if here.group:
            here.joined[here.group] = here.joined.get(here.group, 0) + 1
            here.recent[here.group] = [*here.recent.get(here.group, []), action][-KEPT:]
        here.action = action
        self._call = Call(thread_id=threading.get_ident(), entered=time.monotonic())
        return True

    def rename(self, action: str) -> None:
        """Give the watched call another name: ranks that make it under the first one never meet this one."""
        self._here.action = action
        if self._here.group:
            self._here.recent[self._here.group][-1] = action

    def leave(self) -> None:
        """Note that the watched call has ended."""
        self._call = self._here.action = None

    def fail(self, error: BaseException) -> None:
        """Report to all ranks that this one raised."""
        self._has_failed = True
        self._here.errors += 1
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        is_consequence = isinstance(error, RankFailure) and not isinstance(error, UnmatchedCall)
        self._own_errors += not is_consequence
        self._post("failed", text[:2000], consequence=is_consequence)

    @property
    def action(self) -> str | None:
        """The watched call that this thread is in."""
        return None if self._own_call() is None else self._here.action

    def meet(self) -> None:
        """Wait until all ranks are here, by the store alone: no message of training can be taken for another."""
        start, meeting, call = time.monotonic(), self._meetings, self._own_call()
        self._board.arrive(meeting, self.world_size)
        while not self._board.has_met(meeting):
            waited = time.monotonic() - start
            time.sleep(_POLL_SECONDS if waited > 1 else _POLL_SECONDS / 20)
            error = None if call is None else call.vain
            if error is None and waited > default_timeout().total_seconds():
                error = self._waited_in_vain(self._here.action or "")
            if error is not None:
                self._board.withdraw(meeting)
                self._forget_call()
                if call is not None:
                    # Its traceback would keep process groups, whose connections free other ranks.
                    call.vain = None
                raise error
        self._meetings += 1
        if self.rank == 0 and meeting > 0:
            self._board.forget(meeting - 1)

    def _forget_call(self) -> None:
        """Number the calls as if this one had not been made: nothing was sent in it."""
        here = self._here
        if here.group:
            here.joined[here.group] -= 1
            here.recent[here.group] = here.recent[here.group][:-1]
        here.errors -= 1  # of the error that follows

    def raise_if_in_vain(self) -> None:
        """Raise the error of a call that others never make; what was sent in it makes all later ones wrong."""
        call = self._own_call()
        if call is None or (error := call.vain) is None:
            return
        # Where the other rank meets first (see `meet`), it may handle its error, and come.
        if time.monotonic() - call.since > BRIEF_SECONDS:
            self._given_up, call.vain = str(error), None  # see `meet`
            raise error

    def _own_call(self) -> Call | None:
        call = self._call
        return call if call is not None and call.thread_id == threading.get_ident() else None

    def explain(self, error: BaseException, action: str) -> RankFailure | None:
        """The cause of a broken connection or a timeout, None if it is unknown; waits for the news."""
        start = time.monotonic()
        if self._call is not None:
            self._call.is_reported = True
        while True:
            self._read()
            cause = self._cause()
            if self._is_certain(cause) or self._store_is_lost:
                break
            # A silence may end, and a rank may leave in consequence: better news may be on its way.
            patience = NEWS_SECONDS if cause is None and not is_timeout(error) else BRIEF_SECONDS
            if time.monotonic() - start > patience:
                break
            time.sleep(INTERVAL_SECONDS / 5)
        failure = self._failure(action, str(error))
        if failure is None and is_timeout(error) and not self._store_is_lost:
            with suppress(RuntimeError):
                failure = self._waited_in_vain(action)
        return failure

    def end(self) -> None:
        """Stop the thread, after telling the others that this rank leaves, or with what error it ends."""
        self._stop.set()
        self._thread.join(timeout=2 * SILENT_SECONDS)
        if self._has_failed:  # see [Note: launchers]; and rank 0 may hold the store
            time.sleep(2 * INTERVAL_SECONDS)

    def _run(self) -> None:
        with suppress(RuntimeError):  # every error of a store is one: its server is gone
            while not self._stop.wait(INTERVAL_SECONDS) and default_store() is self.store:
                self._board.show(self._heartbeat())
                self._read()
                self._look_after_next()
                self._look_for_absent()
                self._end_if_stuck()
            self._say_goodbye()
            return
        self._store_is_lost = True

    def _heartbeat(self) -> Heartbeat:
        """The stack of the main thread, which goes on meanwhile."""
        here = self._here
        return replace(
            here,
            beat=time.monotonic_ns(),
            group="" if here.action is None else here.group,
            joined=dict(here.joined),
            recent=dict(here.recent),
        )

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
        beat, now = self._board.beat(rank), time.monotonic()
        if beat is None:
            return  # it has not started to watch
        if self._looked_after is None or self._looked_after[:2] != (rank, beat):
            if any(event.rank == rank for event in self._standing()):
                self._board.post(Event(rank=rank, kind="recovered"))
            self._looked_after = rank, beat, now
        if self._board.is_gone(rank):
            self._board.post(Event(rank=rank, kind="gone"))
        elif now - self._looked_after[2] > SILENT_SECONDS and rank not in {e.rank for e in self._standing()}:
            self._board.post(Event(rank=rank, kind="silent"))

    def _look_for_absent(self) -> None:
        """See [Note: a call that others do not make]."""
        call, own, now = self._call, self._heartbeat(), time.monotonic()
        pause = LOOK_SECONDS * max(1.0, self.world_size / 64)
        if call is None or not own.group or now - call.entered < LOOK_SECONDS or now - self._looked < pause:
            return
        self._looked = now
        beats = {**self._board.beats(members(own.group)), self.rank: own}
        absent = absent_ranks(self.rank, beats)
        if absent and now - call.entered > WAITING_SECONDS and not call.is_announced:
            call.is_announced = True
            if self.rank == min(set(members(own.group)) - set(absent)):
                here = f"rank {self.rank} has waited {now - call.entered:.0f} s in {own.action} (call {own.calls})"
                _say(f"{here} for ranks that have not come: {places(absent, beats)}")
        sure = [rank for rank in absent if (beat := beats[rank]) is None or beat.errors == own.errors]
        error = self._absence(call, own, absent, sure) or self._mismatch(call, own, beats)
        if error is None or call.vain is None:
            call.vain, call.since = error, now

    def _absence(
        self, call: Call, own: Heartbeat, absent: Sequence[int], sure: Sequence[int]
    ) -> RankFailure | None:
        """The error of a call that a rank cannot come to any more; `sure` are those whose calls have our numbers."""
        for event in self._standing():
            if event.rank not in (sure if event.kind == "left" else absent) or event.kind == "silent":
                continue
            # Who failed may have handled it, and come yet; connections that close report it sooner.
            is_over = event.kind in ("left", "gone") or self._board.is_gone(event.rank)
            waited = time.monotonic() - max(call.entered, event.heard)
            if is_over or (self._is_certain(event) and waited > STUCK_SECONDS / 2):
                return self._failure(own.action or "", event=event)
        return None

    def _mismatch(
        self, call: Call, own: Heartbeat, beats: Mapping[int, Heartbeat | None]
    ) -> RankFailure | None:
        """The error of a call that a rank never makes, once two looks have found both where they were."""
        other = never_meeting(self.rank, beats)
        beat = None if other is None else beats[other]
        before, call.suspect = call.suspect, () if beat is None else (other, beat.calls, beat.action)
        if beat is None or call.suspect != before:
            return None
        return UnmatchedCall(
            f"rank {self.rank} is in {own.action} (call {own.calls}) and rank {other} {beat}, and each waits for "
            f"the other: {SAME_CALLS}",
            other,
        )

    def _end_if_stuck(self) -> None:
        """See [Note: end of a stuck process]. Silence is not certain, and who left may have done its work."""
        call, cause, now, patience = self._call, self._cause(), time.monotonic(), STUCK_SECONDS
        is_certain = self._is_certain(cause)
        is_told = cause is None or cause is self._told or (is_certain and call is not None)  # below
        if cause is not None and not is_told and now - cause.heard > patience and cause.kind != "left":
            self._told = cause
            _say(f"{cause}; rank {self.rank} is {self._here} and may wait for it: see docs/cuda.md")
        if call is None:
            return
        if cause is not None and is_certain:
            error, since = self._failure(self._here.action or ""), max(call.entered, cause.heard)
        elif call.vain is not None and now - call.since > BRIEF_SECONDS:
            error, since = call.vain, call.since
            # One ends, and its connections with it, which frees others.
            patience += self.rank * 4 * INTERVAL_SECONDS
        else:
            return
        if not call.is_reported:
            call.is_reported = True
            _say(str(error))
        if now - since > patience:
            if call.vain is not None:
                self.fail(call.vain)
            _say(f"rank {self.rank} could not be freed and ends here")
            with suppress(OSError, ValueError):  # a standard error that is closed, or is no file
                faulthandler.dump_traceback(file=sys.stderr)
            os._exit(1)

    def _say_goodbye(self) -> None:
        self._board.show(self._heartbeat())
        # Set by the interpreter once it has printed an exception that nothing caught.
        error = getattr(sys, "last_value", None)
        if self._has_failed:
            return
        if isinstance(error, BaseException):
            failure = None
            if is_broken(error) or is_timeout(error):  # of a call that nothing of ours stands around
                failure = self.explain(error, "a call outside of Echelon")
                if failure is not None:
                    _say(f"rank {self.rank}: {failure}")
            self.fail(failure or error)
        else:
            self._post("left")

    def _post(self, kind: str, text: str = "", *, consequence: bool = False) -> None:
        with suppress(RuntimeError):  # without a store nobody reads it
            self._board.post(
                Event(rank=self.rank, kind=kind, text=text, consequence=consequence, errors=self._own_errors)
            )

    def _standing(self) -> list[Event]:
        """The last event of every rank that is not well, in the order in which they came."""
        last = {event.rank: event for event in self._events}
        return [event for event in self._events if last[event.rank] is event and event.kind != "recovered"]

    def _cause(self) -> Event | None:
        """The event that explains the others. See [Note: the first cause]."""
        candidates = [
            event for event in self._standing() if event.rank != self.rank and not event.consequence
        ]
        return min(
            candidates, key=lambda event: (not self._is_certain(event), event.kind == "left"), default=None
        )

    def _is_certain(self, cause: Event | None) -> bool:
        """Return True where it is known that the rank will not come back; see [Note: errors that all ranks have]."""
        if cause is None:
            return False
        return cause.kind == "gone" or (cause.kind == "failed" and cause.errors > self._own_errors)

    def _failure(self, action: str, detail: str = "", event: Event | None = None) -> RankFailure | None:
        cause = self._cause() or event
        here = f"this rank ({self.rank}) was waiting for it in {action}"
        if detail.startswith("lost rank"):  # the pipeline's own words: which stage, which microbatch
            here += f" ({detail.partition(': ')[0]})"
        if cause is not None:
            return RankFailure(f"{cause}; {here}", cause.rank)
        if self._store_is_lost:
            return RankFailure(f"the store is gone, which rank 0 or its launcher holds; {here}", 0)
        return None

    def _waited_in_vain(self, action: str) -> RankFailure:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return RankFailure(
            f"rank {self.rank} waited in vain in {action} (call {self._here.calls}) and no rank has failed: "
            f"{places(others, self._board.beats(others))}"
        )


_watch: _Watch | None = None  # of this process: it has one default process group, hence one watch


def start_watch() -> None:
    """Start the watch over the default process group, if it has more than one rank and is not watched yet.

    Called where a run starts (`launch_from_torch`, the mesh) and by `naming_failures`; costs a comparison
    once it is running. Talks to the store, waits for nobody.
    """
    global _watch
    store = default_store()
    if _watch is not None and _watch.store is store and _watch.process_id == os.getpid():
        return
    stop_watch()
    if store is not None and dist.get_world_size() > 1:
        _watch = _Watch(store)
        atexit.register(stop_watch)


def stop_watch() -> None:
    """End the watch and report to the others that this rank leaves. Ends by itself when the group is destroyed."""
    global _watch
    ended, _watch = _watch, None
    if ended is not None and ended.process_id == os.getpid():  # a fork inherits the variable, not the thread
        atexit.unregister(stop_watch)
        ended.end()


def meet_all_ranks() -> None:
    """Wait in a watched call until all ranks of the world have come to it, by the store; for calls that are rare.

    Raises:
        UnmatchedCall: another rank is in another call that waits for this rank. Nothing has been sent: where this is
            handled, all can go on.
        RankFailure: another rank failed, died or left, or did not come within the timeout of the process group.
    """
    if _watch is not None:
        _watch.meet()


def raise_if_in_vain() -> None:
    """Raise where this rank waits for one that never comes. Asked again and again by all that wait in Python."""
    if _watch is not None:
        _watch.raise_if_in_vain()


def rename_call(action: str) -> None:
    """Give the watched call another name, where only some ranks may be in it; nothing in a run of one process."""
    if _watch is not None:
        _watch.rename(action)


def current_call() -> str | None:
    """The watched call that this process is in; None outside, and in a run of one process."""
    return None if _watch is None else _watch.action


@contextmanager
def naming_failures(action: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Around a call that communicates: an error of this rank is reported to all, one of another rank is named.

    An exception of this rank's own passes unchanged, once it is reported to the others. When the connection to
    another rank breaks, or the wait for it times out, what is raised names the rank that is the cause. Serves
    as a decorator too. Nested uses count as the outermost.

    Args:
        action: what is being done, as the messages shall say it: "optimizer.step".
        ranks: that have to make this call, all of them equally often. None is all, () none but this one.

    Raises:
        RankFailure: another rank failed, died or left; chained to what the backend raised.
        UnmatchedCall: another rank is in another call, and both wait for each other.
    """
    start_watch()
    watch = _watch
    if watch is None or not watch.enter(action, ranks):
        yield
        return
    with termination_deferred():
        try:
            yield
        except StopIteration:  # the data ended, which is no failure; who needs more of it compares beforehand
            raise
        except BaseException as error:
            failure = watch.explain(error, action) if is_broken(error) or is_timeout(error) else None
            watch.fail(failure or error)
            if failure is None:
                raise
            raise failure from error
        finally:
            watch.leave()


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a standard error that is closed
        print(text, file=sys.stderr, flush=True)
