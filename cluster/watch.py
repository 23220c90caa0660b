"""The watch thread of a process: it sends heartbeats, reads those of others, and finds the cause of a failure.

[Note: the first cause] If C waits for B, B waits for A, and A dies, then both B and C get connection errors. The event
of a rank that failed only because another one had is marked as a consequence, so that C names A too.

[Note: errors that all ranks have] A rank that raised no more errors than this one may have handled them, as this one
did, and may only be late for the next call. It is named in messages, but ends no process.

[Note: a call that others do not make] After `WAITING_SECONDS` in a call that another rank has not entered, one line
reports which rank waits for which. If heartbeats prove that the other rank never enters this call, or that it has
left, the call raises. It raises at once where it waits in Python (`wait_for_all_ranks`, gathering integers), where
`raise_if_stuck` is polled. A thread that waits inside gloo or NCCL cannot be interrupted, see below.

[Note: places] Once a thread has been in one call, or outside of calls, for `LOOK_SECONDS`, its heartbeats show its
place (whereabouts.py). From them every rank that waits in vain makes a report (hang_report.py). The first rank whose
wait times out posts its report as an event: on the others the connection breaks, or their wait times out a moment
later, when heartbeats show the end of the call. So all raise the same report.

[Note: end of a stuck process] gloo reports a closed connection at once, but nothing interrupts a thread that waits
inside NCCL, or in gloo for a process that failed and is still alive. So the thread prints events while this rank
waits, and ends the process once a failure has been certain for `STUCK_SECONDS` in the same call. Outside of calls a
script may wait for its GPU (`loss.item()`) or do other work: there, and for a silent rank, the thread only reports.

[Note: launchers] torchrun sends SIGTERM to all processes as soon as one has ended. They would end before reporting the
cause, and their own end would look like the cause to others. So a failed process waits until the others have read its
event, and a process that waits for another one ends only after its call.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import RankFailure, UnmatchedCall, is_broken, is_timeout
from .hang_report import hang_report
from .heartbeats import (
    KEPT,
    Event,
    Heartbeat,
    HeartbeatStore,
    WatchedCall,
    absent_ranks,
    default_timeout,
    members,
    unmatched_call,
)
from .whereabouts import Described, Place, place_of, place_of_error, with_communication_in_flight

INTERVAL_SECONDS = 0.5
SILENT_SECONDS = 10.0
STUCK_SECONDS = 20.0
WAITING_SECONDS = 30.0  # or half of the group's timeout, if that is shorter
LOOK_SECONDS = 1.0  # between two checks of the other ranks, per 64 ranks
_POLL_SECONDS = 0.02
# Time that a rank with a broken connection waits for the cause: longer than detecting a silent rank takes.
NEWS_SECONDS = SILENT_SECONDS + 4 * INTERVAL_SECONDS
BRIEF_SECONDS = 4 * INTERVAL_SECONDS
_OTHER_SIZE = (
    "unless it was killed: gloo ends a process whose tensors have another size than those of its peers, as in another "
    "call: compare the calls in the errors of all ranks"
)


class Watch(Described):
    """The watch thread of one process over one default process group.

    Args:
        store: the group's store. A different store means a different group.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.process_id = os.getpid()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout = default_timeout().total_seconds()
        self._heartbeats = HeartbeatStore(store, self.rank)
        self._reading = threading.Lock()
        self._events: list[Event] = []
        self._store_is_lost = False
        self._stop = threading.Event()
        self.here = Heartbeat(beat=0, action=None, calls=0)
        self._call: WatchedCall | None = None
        self._has_failed = False
        self._num_errors = self._num_barriers = 0
        self._reported: Event | None = None  # reported outside of calls
        # The rank that this one monitors, its latest heartbeat, and when that was first seen.
        self._monitored: tuple[int, Heartbeat | None, float] | None = None
        self._last_check = 0.0  # time of the last check for absent ranks
        self._unjoined = ""
        # The state of the main thread at the previous heartbeat, its stack's place, and when each was first seen.
        self._state: tuple[tuple[int, str | None], float] = ((-1, None), 0.0)
        self._stack: tuple[Place | None, float] = (None, 0.0)
        self._place: Place | None = None
        self._heartbeats.show(self._heartbeat())
        self._thread = threading.Thread(target=self._run, name="echelon watch", daemon=True)
        self._thread.start()

    def enter(self, action: str, ranks: Sequence[int] | None) -> bool:
        """Register the start of a watched call. Return False inside another one, which names failures itself."""
        if self._call is not None:
            return False
        if self._unjoined:
            raise RuntimeError(
                f"{action} cannot run after an earlier call that other ranks did not join: start the processes again. "
                f"That call: {self._unjoined}"
            )
        if self._has_failed:  # the error was handled, and this rank participates again
            self._has_failed = False
            self._post("recovered")
        here, ranks = self.here, range(self.world_size) if ranks is None else ranks
        here.calls += 1
        here.group = ",".join(map(str, ranks)) if len(ranks) > 1 else ""
        if here.group:
            here.joined[here.group] = here.joined.get(here.group, 0) + 1
            here.recent[here.group] = [*here.recent.get(here.group, []), action][-KEPT:]
        here.batch, here.action = "", action
        self._call = WatchedCall(thread_id=threading.get_ident(), entered=time.monotonic())
        return True

    def describe(self) -> str:
        """Describe the methods that wait in the store."""
        return "waiting in the store for other ranks"

    def peers(self) -> tuple[int, ...]:
        """All other ranks."""
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    def rename(self, action: str) -> None:
        """Rename the watched call: ranks in it under the old name do not match this one any more."""
        self.here.action = action
        if self.here.group:
            self.here.recent[self.here.group][-1] = action

    def leave(self) -> None:
        """Register the end of the watched call."""
        self._call = self.here.action = None

    def fail(self, error: BaseException) -> None:
        """Report this rank's error to all ranks."""
        self._has_failed = True
        self.here.errors += 1
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        is_consequence = isinstance(error, RankFailure) and not isinstance(error, UnmatchedCall)
        self._num_errors += not is_consequence
        self._post("failed", text[:2000], consequence=is_consequence)

    @property
    def action(self) -> str | None:
        """The watched call that this thread is in."""
        return None if self._call_of_this_thread() is None else self.here.action

    def wait_for_all(self) -> None:
        """Wait for all ranks through the store only, so that no message of training can be mixed up with another."""
        barrier = self._num_barriers
        self._wait_at(f"barrier {barrier}", self.world_size)
        self._num_barriers += 1
        if self.rank == 0 and barrier > 0:
            self._heartbeats.forget(f"barrier {barrier - 1}")

    def wait_for_batch(self, batch: str, replica: Sequence[int]) -> None:
        """Wait through the store until all ranks of a replica have had a batch of these names, shapes and dtypes."""
        self._wait_at(f"batch {batch} of {replica[0]}", len(replica))

    def _wait_at(self, name: str, size: int) -> None:
        """Wait at a barrier in the store; raise if another rank never comes."""
        start, call = time.monotonic(), self._call_of_this_thread()
        self._heartbeats.arrive(name, size)
        while not self._heartbeats.all_arrived(name):
            waited = time.monotonic() - start
            time.sleep(_POLL_SECONDS if waited > 1 else _POLL_SECONDS / 20)
            error = None if call is None else call.unmatched
            if error is None and waited > self._timeout:
                error = RankFailure(self._timed_out(self.here.action or ""))
            if error is not None and not self._heartbeats.all_arrived(name):
                self._heartbeats.withdraw(name)
                self._forget_call()
                if call is not None:
                    # Its traceback would keep process groups alive; closing their connections frees other ranks.
                    call.unmatched = None
                raise error

    def _forget_call(self) -> None:
        """Undo the count of this call: nothing was sent in it."""
        here = self.here
        if here.group:
            here.joined[here.group] -= 1
            here.recent[here.group] = here.recent[here.group][:-1]
        # Cancels the count of `fail`: ranks compare calls only at equal numbers of errors.
        here.errors -= 1

    def raise_if_stuck(self) -> None:
        """Raise the error of a call that other ranks never make; its messages would corrupt all later calls."""
        call = self._call_of_this_thread()
        if call is None or (error := call.unmatched) is None:
            return
        # A rank that waits in `wait_for_all` first may handle its error there, and enter this call.
        if time.monotonic() - call.since > BRIEF_SECONDS:
            self._unjoined, call.unmatched = str(error), None  # see `wait_for_all`
            raise error

    def _call_of_this_thread(self) -> WatchedCall | None:
        call = self._call
        return call if call is not None and call.thread_id == threading.get_ident() else None

    def explain(self, error: BaseException, action: str) -> RankFailure | None:
        """Find the cause of a broken connection or a timeout, None if unknown; waits for its event."""
        start = time.monotonic()
        if (call := self._call_of_this_thread()) is not None:
            call.is_reported = True
        entered = start if call is None else call.entered
        self._read()
        if is_timeout(error) and self._timed_out_event(entered) is None:
            self._post("timed out", self._timed_out(action))
        while True:
            self._read()
            cause = self._cause()
            if self._is_certain(cause) or self._store_is_lost:
                break
            # A silent rank may return, and a rank may leave as a consequence: a better event may follow.
            is_explained = cause is not None or self._timed_out_event(entered) is not None
            if time.monotonic() - start > (BRIEF_SECONDS if is_explained else NEWS_SECONDS):
                break
            time.sleep(INTERVAL_SECONDS / 5)
        failure = self._failure(action, error)
        if failure is None and (event := self._timed_out_event(entered)) is not None:
            failure = RankFailure(f"{event.text}\nThis rank ({self.rank}) was waiting in {action}.")
        return failure

    def _timed_out_event(self, since: float) -> Event | None:
        """The first event of a wait that timed out while this rank was in its call; see [Note: places]."""
        events = (event for event in self._events if event.kind == "timed out" and event.heard >= since)
        return next(events, None)

    def end(self) -> None:
        """Stop the thread, after reporting that this rank leaves, or its error."""
        self._stop.set()
        self._thread.join(timeout=2 * SILENT_SECONDS)
        if self._has_failed:  # see [Note: launchers]; rank 0 may also host the store
            time.sleep(2 * INTERVAL_SECONDS)

    def _run(self) -> None:
        """Show heartbeats and look for failures until the process or its group ends; the body of the thread."""
        with suppress(RuntimeError):  # stores raise only RuntimeError, when their server is gone
            while not self._stop.wait(INTERVAL_SECONDS) and default_store() is self.store:
                self._heartbeats.show(self._heartbeat())
                self._read()
                self._monitor_next_rank()
                self._check_for_absent_ranks()
                self._end_if_stuck()
            self._say_goodbye()
            return
        self._store_is_lost = True

    def _heartbeat(self) -> Heartbeat:
        """Read the state of the main thread, which keeps running."""
        here = self.here
        self._look_at_place()
        return replace(
            here,
            place=self._place,
            waited=0.0 if self._place is None else time.monotonic() - self._stack[1],
            beat=time.monotonic_ns(),
            group="" if here.action is None else here.group,
            joined=dict(here.joined),
            recent=dict(here.recent),
        )

    def _look_at_place(self) -> None:
        """Read the place of the thread that is in a call, or of the main thread; see [Note: places]."""
        now, call = time.monotonic(), self._call
        if call is not None and call.is_reported:
            return  # its stack shows the report
        state = (self.here.calls, self.here.action)
        if self._state[0] != state:
            self._state, self._stack, self._place = (state, now), (None, now), None
        if now - self._state[1] < LOOK_SECONDS:
            return
        thread = threading.main_thread().ident if call is None else call.thread_id
        with suppress(Exception):  # a stack that changes meanwhile must not end the watch
            place = place_of(thread or 0)
            if place != self._stack[0]:
                since = self._state[1] if self._stack[0] is None else now
                self._stack, self._place = (place, since), place
            elif self._place is self._stack[0]:  # once for each place
                self._place = with_communication_in_flight(place)

    def _read(self) -> None:
        """Read new events. Both threads call it, under a lock."""
        with self._reading:
            try:
                self._events += self._heartbeats.news()
            except RuntimeError:
                self._store_is_lost = True

    def _monitor_next_rank(self) -> None:
        """Post an event if the next live rank is gone, silent or back."""
        ended = {event.rank for event in self._standing() if event.kind != "silent"}
        ranks = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        rank = next((rank for rank in ranks if rank not in ended), None)
        if rank is None:
            return
        beat, now = self._heartbeats.beat(rank), time.monotonic()
        if beat is None:
            return  # it has not started its watch yet
        if self._monitored is None or self._monitored[:2] != (rank, beat):
            if any(event.rank == rank for event in self._standing()):
                self._heartbeats.post(Event(rank=rank, kind="recovered"))
            self._monitored = rank, beat, now
        if self._heartbeats.is_gone(rank):
            self._heartbeats.post(Event(rank=rank, kind="gone"))
            return
        is_reported = any(event.rank == rank for event in self._standing())
        if now - self._monitored[2] > SILENT_SECONDS and not is_reported:
            self._heartbeats.post(Event(rank=rank, kind="silent"))

    def _check_for_absent_ranks(self) -> None:
        """Report ranks that have not entered this call; see [Note: a call that others do not make]."""
        call, here, now = self._call, self._heartbeat(), time.monotonic()
        pause = LOOK_SECONDS * max(1.0, self.world_size / 64)
        if (
            call is None
            or not here.group
            or now - call.entered < LOOK_SECONDS
            or now - self._last_check < pause
        ):
            return
        self._last_check = now
        beats = {**self._heartbeats.beats(members(here.group)), self.rank: here}
        absent = absent_ranks(self.rank, beats)
        patience = min(WAITING_SECONDS, self._timeout / 2)
        if absent and now - call.entered > patience and not call.is_announced:
            call.is_announced = True
            if self.rank == min(set(members(here.group)) - set(absent)):
                waited = f"has waited {now - call.entered:.0f} s in {here.action} (call {here.calls})"
                _say(f"rank {self.rank} {waited} for ranks that have not joined; {self._report()}")
        # Ranks with other numbers of errors count their calls differently: one that left may have made this call.
        comparable = [rank for rank in absent if (beat := beats[rank]) is None or beat.errors == here.errors]
        error = self._absence(call, here, absent, comparable) or self._mismatch(call, beats)
        if error is None or call.unmatched is None:
            call.unmatched, call.since = error, now

    def _absence(
        self, call: WatchedCall, here: Heartbeat, absent: Sequence[int], comparable: Sequence[int]
    ) -> RankFailure | None:
        """The error of a call that a rank can never enter any more.

        Args:
            call, here: this rank's call and heartbeat.
            absent: ranks that have not entered the call, by the counts of their calls.
            comparable: those of them whose counts are comparable with this rank's.
        """
        for event in self._standing():
            candidates = comparable if event.kind == "left" else absent
            if event.kind == "silent" or event.rank not in candidates:
                continue
            # A failed rank may have handled its error and still come; closed connections report earlier.
            is_over = event.kind in ("left", "gone") or self._heartbeats.is_gone(event.rank)
            waited = time.monotonic() - max(call.entered, event.heard)
            if is_over or (self._is_certain(event) and waited > STUCK_SECONDS / 2):
                return self._failure(here.action or "", event=event)
        return None

    def _mismatch(self, call: WatchedCall, beats: Mapping[int, Heartbeat | None]) -> RankFailure | None:
        """The error of a call that a rank never makes, once two checks found both ranks unchanged."""
        error = unmatched_call(self.rank, beats)
        previous, call.suspected = call.suspected, str(error)  # with the calls and batches of both
        if error is None or call.suspected != previous:
            return None
        return UnmatchedCall(f"{error}\n{self._report()}", error.rank)

    def _end_if_stuck(self) -> None:
        """End the process if the rank that it waits for certainly failed; see [Note: end of a stuck process]."""
        call, cause, now = self._call, self._cause(), time.monotonic()
        is_certain = self._is_certain(cause)
        # A failure that was reported outside of calls is handled again in a call, once it is certain.
        is_reported = cause is self._reported or (is_certain and call is not None)
        if cause and not is_reported and now - cause.heard > STUCK_SECONDS and cause.kind != "left":
            self._reported = cause
            _say(f"{cause}; rank {self.rank} is {self.here} and may wait for it: see docs/cuda.md")
        if call is None:
            return
        # The times since when this process is stuck, by a failed rank and by an unmatched call. The earliest counts,
        # since the end of another rank may free nobody here.
        stuck_since = [max(call.entered, cause.heard)] if cause is not None and is_certain else []
        error = self._failure(self.here.action or "") if stuck_since else call.unmatched
        if call.unmatched is not None and now - call.since > BRIEF_SECONDS:
            # One process ends first; its connections close, which frees others.
            stuck_since.append(call.since + self.rank * 4 * INTERVAL_SECONDS)
        if not stuck_since:
            return
        if not call.is_reported:
            call.is_reported = True
            _say(str(error))
        if now - min(stuck_since) > STUCK_SECONDS:
            if call.unmatched is not None:
                self.fail(call.unmatched)
            _say(f"rank {self.rank} could not be interrupted and exits")
            with suppress(OSError, ValueError):  # standard error is closed, or is no file
                faulthandler.dump_traceback(file=sys.stderr)
            os._exit(1)

    def _say_goodbye(self) -> None:
        """Report the end of this rank to the others: by an uncaught error, or without one."""
        self._heartbeats.show(self._heartbeat())
        # The interpreter sets these after printing an uncaught exception.
        error = getattr(sys, "last_value", None)
        if self._has_failed:
            return
        if isinstance(error, BaseException):
            failure = None
            if is_broken(error) or is_timeout(error):  # raised in a call outside of Echelon
                failure = self.explain(error, "a call outside of Echelon")
                if failure is not None:
                    _say(f"rank {self.rank}: {failure}")
            self.fail(failure or error)
        else:
            self._post("left")

    def _post(self, kind: str, text: str = "", *, consequence: bool = False) -> None:
        with suppress(RuntimeError):  # without a store nobody could read it
            self._heartbeats.post(
                Event(rank=self.rank, kind=kind, text=text, consequence=consequence, errors=self._num_errors)
            )

    def _standing(self) -> list[Event]:
        """The last event of every rank that has not recovered, oldest first."""
        last: dict[int, Event] = {}
        for event in self._events:
            if event.kind != "timed out":
                last.pop(event.rank, None)  # so that it is the newest again
                last[event.rank] = event
        return [event for event in last.values() if event.kind != "recovered"]

    def _cause(self) -> Event | None:
        """The event that caused the others; see [Note: the first cause]."""
        candidates = [
            event for event in self._standing() if event.rank != self.rank and not event.consequence
        ]
        return min(
            candidates, key=lambda event: (not self._is_certain(event), event.kind == "left"), default=None
        )

    def _is_certain(self, cause: Event | None) -> bool:
        """Return True if the rank certainly never comes back; see [Note: errors that all ranks have]."""
        if cause is None:
            return False
        return cause.kind == "gone" or (cause.kind == "failed" and cause.errors > self._num_errors)

    def _failure(
        self, action: str, error: BaseException | None = None, event: Event | None = None
    ) -> RankFailure | None:
        """Return the error of the rank that failed first, or else of `event`; None if no rank has failed.

        Args:
            action: name of this rank's call.
            error: of the backend, raised in it.
            event: used if there is no cause.
        """
        cause = self._cause() or event
        place = Place() if error is None else place_of_error(error)
        here = f"this rank ({self.rank}) was waiting for it in {action}{f', {place}' if str(place) else ''}"
        if cause is not None:
            hint = f"; {_OTHER_SIZE}" if cause.kind == "gone" and place.collective else ""
            separator = "\n" if "\n" in cause.text else "; "
            return RankFailure(f"{cause}{separator}{here}{hint}", cause.rank)
        if self._store_is_lost:
            return RankFailure(f"the store is gone, which rank 0 or its launcher hosts; {here}", 0)
        return None

    def _timed_out(self, action: str) -> str:
        """Describe a call that timed out while all ranks are alive, with the place of each."""
        text = f"rank {self.rank} timed out in {action} (call {self.here.calls}) and no rank has failed"
        return f"{text}; {self._report()}"

    def _report(self) -> str:
        """Report where all ranks are, by their latest heartbeats; see [Note: places]."""
        with suppress(RuntimeError):  # the store is lost
            return hang_report(self.rank, self._heartbeats.beats(range(self.world_size)), self._standing())
        return "the store is gone, so where the other ranks are is unknown"


def default_store() -> dist.Store | None:
    """The store of the default process group, one object for the lifetime of the group. Uses private torch API."""
    try:
        return distributed_c10d._get_default_store() if dist.is_initialized() else None
    except (ValueError, KeyError):  # another thread is destroying the group
        return None


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # standard error is closed
        print(text, file=sys.stderr, flush=True)
