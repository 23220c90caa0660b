"""Heartbeats and events of ranks in the store of a run, and detection of mismatched calls from heartbeats."""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import SAME_CALLS, RankFailure, UnmatchedCall
from .whereabouts import Place

UNKNOWN_MACHINE = "0" * 12  # without /proc
KEPT = 4  # names of the latest calls that are kept for each group
MOST_NAMED = 8  # the most ranks that a message lists


@dataclass(kw_only=True)
class Heartbeat:
    """A counter that increases while the process lives, and the call that its main thread is in.

    Args:
        beat: the counter.
        action: name of the current call, None outside of calls.
        calls: number of calls that it has entered.
        group: the ranks that must make this call, "0,1,2"; empty if this rank may make it alone.
        joined: number of calls that it has entered, by group.
        recent: names of the latest calls, by group.
        errors: number of calls that raised.
        batch: names, shapes and dtypes of the batch of the current call; empty if they were not reported.
        replica: the ranks that must have this batch, as `group`.
        data_ended: number of calls that it had entered when its data ended; -1 before.
        place: what its main thread does, once it has been in this call, or outside of calls, for a second.
        waited: seconds since it came to this place, at the time of the heartbeat.
    """

    beat: int
    action: str | None
    calls: int
    group: str = ""
    joined: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[str]] = field(default_factory=dict)
    errors: int = 0
    batch: str = ""
    replica: str = ""
    data_ended: int = -1
    place: Place | None = None
    waited: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.place, list):  # read from JSON
            self.place = Place.read(self.place)

    def __str__(self) -> str:
        where = "outside of Echelon, after" if self.action is None else f"in {self.action},"
        return f"{where} call {self.calls}"

    @property
    def data_has_ended(self) -> bool:
        """Return True if it has made no call since its data ended."""
        return self.data_ended == self.calls

    @property
    def number(self) -> int:
        """The number of the current call, among those of its group."""
        return self.joined.get(self.group, 0)

    def has_come(self, other: "Heartbeat") -> bool:
        """Return True if this process has entered the call that the other process is in."""
        return self.joined.get(other.group, 0) >= other.number

    def name_of(self, group: str, number: int) -> str | None:
        """Name of the call of this number in a group; None if it was not made or is no longer kept."""
        recent, behind = self.recent.get(group, []), self.joined.get(group, 0) - number
        return recent[-1 - behind] if 0 <= behind < len(recent) else None


@dataclass(kw_only=True, eq=False)
class WatchedCall:
    """The watched call that a thread is in, and the findings of the watch about it.

    Args:
        thread_id: id of the thread.
        entered: start time.
        is_reported: True once its error has been printed or raised.
        is_announced: True once a line has named the ranks that it waits for.
        suspected: text of what the latest check found.
        unmatched, since: the error of a call that can never complete, and the time when it was found.
    """

    thread_id: int
    entered: float
    is_reported: bool = False
    is_announced: bool = False
    suspected: str = ""
    unmatched: RankFailure | None = None
    since: float = 0.0


def members(group: str) -> list[int]:
    """The ranks of a group."""
    return [int(rank) for rank in group.split(",")] if group else []


def absent_ranks(rank: int, beats: Mapping[int, Heartbeat | None]) -> list[int]:
    """The ranks that have not entered the call that a rank is in."""
    waiting = beats[rank]
    assert waiting is not None
    others = [(other, beats.get(other)) for other in members(waiting.group) if other != rank]
    return [other for other, beat in others if beat is None or not beat.has_come(waiting)]


def unmatched_call(rank: int, beats: Mapping[int, Heartbeat | None]) -> UnmatchedCall | None:
    """The error of a call that can never complete, and the rank that does not match; None if heartbeats prove nothing.

    It is proven if another rank is in the same call with a batch of other names, shapes or dtypes that should be equal,
    or will never enter the call. Ranks that raised a different number of errors are left out: their calls are numbered
    differently.
    """
    waiting = beats[rank]
    assert waiting is not None
    here = f"rank {rank} is in {waiting.action} (call {waiting.calls})"
    for other in members(waiting.group):
        beat = beats.get(other)
        if other == rank or beat is None or beat.errors != waiting.errors:
            continue
        if _has_another_batch(waiting, beat):
            return UnmatchedCall(
                f"{here} with a batch of {waiting.batch}, and rank {other} of the same replica with one of "
                f"{beat.batch}: give every rank of a replica the same batch",
                other,
            )
        if _never_enters(beat, waiting, rank):
            there = f"rank {other} {beat}, and each waits for the other"
            return UnmatchedCall(f"{here} and {there}: {SAME_CALLS}", other)
    return None


def _has_another_batch(first: Heartbeat, second: Heartbeat) -> bool:
    """Return True if two ranks of a replica are in the same call with batches of other names, shapes or dtypes."""
    if not first.batch or not second.batch or first.replica != second.replica:
        return False
    is_same_call = (second.group, second.number, second.action) == (first.group, first.number, first.action)
    return is_same_call and second.batch != first.batch


def _never_enters(beat: Heartbeat, waiting: Heartbeat, rank: int) -> bool:
    """Return True if it is certain that a process will not enter the call that `rank` waits in.

    It has made another call in its place, or waits itself, in a call of another group that `rank` has not entered.
    """
    if beat.action == waiting.action:  # calls of one name may meet, whatever their numbers
        return False
    if beat.name_of(waiting.group, waiting.number) not in (None, waiting.action):
        return True
    waits_for_rank = (
        beat.group != waiting.group and rank in members(beat.group) and not waiting.has_come(beat)
    )
    return waits_for_rank and not beat.has_come(waiting)


# A store that does not answer in this time is treated as gone.
ANSWER_SECONDS = 30.0
_TEXTS = {
    "failed": "rank {rank} failed: {text}",
    "gone": "rank {rank} died: its process is gone",
    "silent": "rank {rank} sends no heartbeats",
    "left": "rank {rank} left: its script ended, or it destroyed the process group",
    "recovered": "rank {rank} is back",
    "timed out": "rank {rank} waited in vain: {text}",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of a rank's state: it "failed", is "gone" or "silent", "left", "recovered", or its wait "timed out".

    Args:
        text: text of its error.
        consequence: True if it failed because another rank had failed.
        errors: number of errors that the rank has had, including this one.
        heard: time when this process read the event.
    """

    rank: int
    kind: str
    text: str = ""
    consequence: bool = False
    errors: int = 0
    heard: float = field(default_factory=time.monotonic, compare=False)

    def __str__(self) -> str:
        return _TEXTS[self.kind].format(rank=self.rank, text=self.text)


class HeartbeatStore:
    """One rank's access to heartbeats and events in the store, by its own connection, for two threads.

    Args:
        store: the store of the default process group.
        rank: this process.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        # The group's own connection is locked while any thread waits on it.
        connection = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        connection.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        # A store may outlive a process group, so each group has its own keys: all ranks count their groups alike.
        group_number = connection.add(f"echelon/heartbeats/groups/{rank}", 1)
        self._store = dist.PrefixStore(f"echelon/heartbeats/{group_number}", connection)
        self._rank = rank
        self._num_read = 0  # events that `news` has returned
        self._processes: dict[int, tuple[str, int]] = {}  # by rank, the machine and the process id
        self._store.set(f"process/{rank}", json.dumps([machine_id(), os.getpid()]))

    def show(self, beat: Heartbeat) -> None:
        """Publish this rank's heartbeat in place of its previous one."""
        self._store.set(f"sign/{self._rank}", json.dumps(asdict(beat)))

    def beat(self, rank: int) -> Heartbeat | None:
        """A rank's latest heartbeat; None before its first."""
        content = self._get(f"sign/{rank}")
        return None if content is None else Heartbeat(**content)

    def beats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """The latest heartbeats of ranks, by two requests if all ranks have one."""
        keys = [f"sign/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return {rank: self.beat(rank) for rank in ranks}
        contents = self._store.multi_get(keys)
        return {rank: Heartbeat(**json.loads(content)) for rank, content in zip(ranks, contents, strict=True)}

    def arrive(self, barrier: str, size: int) -> None:
        """Register this rank at a barrier of `size` ranks."""
        if self._store.add(f"arrived/{barrier}", 1) == size:
            self._store.set(f"met/{barrier}", "")

    def withdraw(self, barrier: str) -> None:
        """Withdraw this rank from a barrier."""
        self._store.add(f"arrived/{barrier}", -1)

    def all_arrived(self, barrier: str) -> bool:
        """Return True if all ranks have arrived at a barrier."""
        return bool(self._store.check([f"met/{barrier}"]))

    def forget(self, barrier: str) -> None:
        """Delete the keys of a barrier that all ranks have left."""
        for key in (f"arrived/{barrier}", f"met/{barrier}"):
            self._store.delete_key(key)

    def post(self, event: Event) -> None:
        """Add an event for all ranks, this one included."""
        content = {key: value for key, value in asdict(event).items() if key != "heard"}
        # Written before it is counted: a reader waiting for an unwritten event would block the connection
        # that writes it.
        self._store.append("events", json.dumps(content) + "\n")  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store.add("number of events", 1)

    def news(self) -> list[Event]:
        """The events posted since the last call, in the same order on all ranks."""
        if self._store.add("number of events", 0) <= self._num_read:
            return []
        contents = self._store.get("events").decode().splitlines()
        fresh, self._num_read = contents[self._num_read :], len(contents)
        return [Event(**json.loads(content)) for content in fresh]

    def is_gone(self, rank: int) -> bool:
        """Return True if a rank's process has certainly ended; known only for processes of this machine."""
        if rank not in self._processes and (process := self._get(f"process/{rank}")) is not None:
            self._processes[rank] = process[0], process[1]
        machine, process_id = self._processes.get(rank, ("", 0))
        return machine == machine_id() != UNKNOWN_MACHINE and has_ended(process_id)

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


@cache
def machine_id() -> str:
    """Return an id of this machine's boot and of its namespace of process ids, which hosts of one name do not share."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256((booted + os.readlink("/proc/self/ns/pid")).encode()).hexdigest()[:12]
    except OSError:
        return UNKNOWN_MACHINE


def has_ended(process_id: int) -> bool:
    """Return True if a process of this machine no longer runs; a zombie process counts as ended."""
    try:
        os.kill(process_id, 0)
        status = Path(f"/proc/{process_id}/stat")
        return status.exists() and status.read_text().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:  # it runs as another user
        return False


def default_timeout() -> timedelta:
    """The timeout of the default group, which torch does not pass on to other groups. Uses private torch API.

    For a backend without a timeout, such as a custom one, this is torch's default.
    """
    world = distributed_c10d._get_default_group()
    options = [getattr(world._get_backend(device), "options", None) for device in world._device_types]
    timeouts: list[timedelta] = [option._timeout for option in options if option is not None]
    return max(timeouts, default=distributed_c10d.default_pg_timeout)
