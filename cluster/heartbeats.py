"""Heartbeats and news of ranks in the store of a run, and what is certain of two heartbeats."""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import RankFailure

KEPT = 4  # names of the latest calls of a group
MOST_NAMED = 8  # ranks in a message


@dataclass(kw_only=True)
class Heartbeat:
    """A number that changes while the process lives, and where its main thread stands.

    Args:
        beat: the number.
        action: the call it is in, None outside.
        calls: how many calls it has begun, of all kinds.
        group: the ranks that have to make this call, "0,1,2"; empty where it may be alone.
        joined: by group, how many of its calls it has begun.
        recent: by group, the names of the latest of them.
        errors: how many calls have raised.
    """

    beat: int
    action: str | None
    calls: int
    group: str = ""
    joined: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[str]] = field(default_factory=dict)
    errors: int = 0

    def __str__(self) -> str:
        where = "outside of Echelon, after" if self.action is None else f"in {self.action},"
        return f"{where} call {self.calls}"

    @property
    def number(self) -> int:
        """The number of the call it is in, among those of the group."""
        return self.joined.get(self.group, 0)

    def has_come(self, other: "Heartbeat") -> bool:
        """Return True if this process has made the call that another one is in."""
        return self.joined.get(other.group, 0) >= other.number

    def name_of(self, group: str, number: int) -> str | None:
        """The call of this number in a group, None where it was not made or is long ago."""
        recent, behind = self.recent.get(group, []), self.joined.get(group, 0) - number
        return recent[-1 - behind] if 0 <= behind < len(recent) else None


@dataclass(kw_only=True, eq=False)
class Call:
    """The watched call that a thread is in, and what the watch has found out about it.

    Args:
        thread_id: of the thread.
        entered: when it began.
        is_reported: whether its error is printed or raised.
        is_announced: whether a line says for whom it waits.
        suspect: a rank that may never meet it, and where that was.
        vain, since: the error of a call that cannot end, and when it was found.
    """

    thread_id: int
    entered: float
    is_reported: bool = False
    is_announced: bool = False
    suspect: tuple[Any, ...] = ()
    vain: RankFailure | None = None
    since: float = 0.0


def members(group: str) -> list[int]:
    """The ranks of a group."""
    return [int(rank) for rank in group.split(",")] if group else []


def absent_ranks(rank: int, beats: Mapping[int, Heartbeat | None]) -> list[int]:
    """The ranks that have not made the call that a rank is in."""
    own = beats[rank]
    assert own is not None
    return [
        other
        for other in members(own.group)
        if other != rank and ((beat := beats.get(other)) is None or not beat.has_come(own))
    ]


def never_meeting(rank: int, beats: Mapping[int, Heartbeat | None]) -> int | None:
    """A rank that never makes the call that `rank` is in; None where that is not certain of any.

    It is certain where the group's call of this number has another name there, or where that rank waits in a call of
    another group that `rank` has not made. Ranks that have raised differently often are left out: their numbers differ.
    """
    own = beats[rank]
    assert own is not None
    for other in members(own.group):
        beat = beats.get(other)
        if other == rank or beat is None or beat.errors != own.errors or beat.action == own.action:
            continue
        name = beat.name_of(own.group, own.number)
        if name is not None and name != own.action:
            return other
        if not beat.has_come(own) and _waits_for(beat, rank, own):
            return other
    return None


def _waits_for(beat: Heartbeat, rank: int, own: Heartbeat) -> bool:
    """Return True if a process is in a call of another group that `rank` has not made."""
    return beat.group != own.group and rank in members(beat.group) and not own.has_come(beat)


def places(ranks: Iterable[int], beats: Mapping[int, Heartbeat | None]) -> str:
    """Where ranks are, as a message shall say it."""
    found = [f"rank {rank} is {beats.get(rank) or 'not connected yet'}" for rank in ranks]
    more = len(found) - MOST_NAMED
    return "; ".join(found[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else []))


# A store that takes longer to answer is treated as gone.
ANSWER_SECONDS = 30.0
_TEXTS = {
    "failed": "rank {rank} failed: {text}",
    "gone": "rank {rank} died: its process is gone",
    "silent": "rank {rank} gives no sign of life",
    "left": "rank {rank} left: its script ended, or it destroyed the process group",
    "recovered": "rank {rank} is back",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """News of a rank: that it "failed", is "gone" or "silent", "left", or "recovered" from any of these.

    Args:
        text: the error that it failed with.
        consequence: it failed because another rank had.
        errors: how many errors of its own the rank has had with this one.
        heard: when this process read it.
    """

    rank: int
    kind: str
    text: str = ""
    consequence: bool = False
    errors: int = 0
    heard: float = field(default_factory=time.monotonic, compare=False)

    def __str__(self) -> str:
        return _TEXTS[self.kind].format(rank=self.rank, text=self.text)


class Board:
    """One rank's access to the board, over a connection of its own, which two of its threads may use.

    Args:
        store: the store of the default process group.
        rank: this process.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        # The group's own connection is locked while something waits on it.
        connection = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        connection.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        # A store may outlive a process group, and its ranks count alike how often they have started anew.
        life = connection.add(f"echelon/board/lives/{rank}", 1)
        self._store = dist.PrefixStore(f"echelon/board/{life}", connection)
        self._rank = rank
        self._num_read = 0
        self._processes: dict[int, tuple[str, int]] = {}
        self._store.set(f"process/{rank}", json.dumps([_place(), os.getpid()]))

    def show(self, beat: Heartbeat) -> None:
        """Replace this rank's heartbeat."""
        self._store.set(f"sign/{self._rank}", json.dumps(asdict(beat)))

    def beat(self, rank: int) -> Heartbeat | None:
        """A rank's latest heartbeat; None before its first."""
        content = self._get(f"sign/{rank}")
        return None if content is None else Heartbeat(**content)

    def beats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """The latest heartbeats of ranks, by two requests where all have one."""
        keys = [f"sign/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return {rank: self.beat(rank) for rank in ranks}
        contents = self._store.multi_get(keys)
        return {rank: Heartbeat(**json.loads(content)) for rank, content in zip(ranks, contents, strict=True)}

    def arrive(self, meeting: int, world_size: int) -> None:
        """Note that this rank has come to a meeting of all ranks."""
        if self._store.add(f"arrived/{meeting}", 1) == world_size:
            self._store.set(f"met/{meeting}", "")

    def withdraw(self, meeting: int) -> None:
        """Take the arrival back."""
        self._store.add(f"arrived/{meeting}", -1)

    def has_met(self, meeting: int) -> bool:
        """Return True if all ranks have come to a meeting."""
        return bool(self._store.check([f"met/{meeting}"]))

    def forget(self, meeting: int) -> None:
        """Drop the entries of a meeting that all ranks have left."""
        for key in (f"arrived/{meeting}", f"met/{meeting}"):
            self._store.delete_key(key)

    def post(self, event: Event) -> None:
        """Add news for all ranks, this one included."""
        content = {key: value for key, value in asdict(event).items() if key != "heard"}
        # Written before it is counted: who read what is still to come would hold the connection that has to write it.
        self._store.append("events", json.dumps(content) + "\n")  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store.add("number of events", 1)

    def news(self) -> list[Event]:
        """The news posted since the last call, in one order on all ranks."""
        if self._store.add("number of events", 0) <= self._num_read:
            return []
        contents = self._store.get("events").decode().splitlines()
        fresh, self._num_read = contents[self._num_read :], len(contents)
        return [Event(**json.loads(content)) for content in fresh]

    def is_gone(self, rank: int) -> bool:
        """Return True if a rank's process has ended for certain: only known of processes on this machine."""
        if rank not in self._processes and (process := self._get(f"process/{rank}")) is not None:
            self._processes[rank] = process[0], process[1]
        place, process_id = self._processes.get(rank, ("", 0))
        return place == _place() and has_ended(process_id)

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


@cache
def _place() -> str:
    """This machine, and the name space in which its process numbers count."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def has_ended(process_id: int) -> bool:
    """Return True if a process of this machine no longer runs; one that nobody has waited for yet counts as ended."""
    try:
        os.kill(process_id, 0)
        status = Path(f"/proc/{process_id}/stat")
        return status.exists() and status.read_text().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:  # it runs as another user
        return False


def default_timeout() -> timedelta:
    """The timeout of the default group; torch gives other groups its own default instead. Private to torch.

    Of a backend that has none, a custom one for example, it is torch's default.
    """
    world = distributed_c10d._get_default_group()
    options = [getattr(world._get_backend(device), "options", None) for device in world._device_types]
    given: list[timedelta] = [each._timeout for each in options if each is not None]
    return max(given, default=distributed_c10d.default_pg_timeout)


def default_store() -> dist.Store | None:
    """The store of the default process group, the same object for as long as the group lives. Private to torch."""
    try:
        return distributed_c10d._get_default_store() if dist.is_initialized() else None
    except (ValueError, KeyError):  # another thread is destroying the group
        return None
