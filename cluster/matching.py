"""Calls that every rank of a group has to make, compared by the heartbeats: who has not come yet, and who never will.

[Note: certainty] Ranks are rightly in different calls for a while, so of two heartbeats only this is certain. Each
process numbers the calls that it makes together with the same ranks. Where one's call of a number is another's of
another name, the two never meet. Neither do they where each waits for the other in a call of another group. An error
that only one rank handled parts the numbers: nothing is certain from then on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KEPT = 4  # names of the latest calls of a group
MOST_NAMED = 8  # ranks in a message


@dataclass(frozen=True, kw_only=True)
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
    joined: Mapping[str, int] = field(default_factory=dict)
    recent: Mapping[str, list[str]] = field(default_factory=dict)
    errors: int = 0

    def __str__(self) -> str:
        where = "outside of Echelon, after" if self.action is None else f"in {self.action},"
        return f"{where} call {self.calls}"

    @property
    def number(self) -> int:
        """The number of the call it is in, among those of the group."""
        return self.joined.get(self.group, 0)

    def has_come(self, other: "Heartbeat") -> bool:
        """Whether this process has made the call that another one is in."""
        return self.joined.get(other.group, 0) >= other.number

    def name_of(self, group: str, number: int) -> str | None:
        """The call of this number in a group, None where it was not made or is long ago."""
        recent, behind = self.recent.get(group, []), self.joined.get(group, 0) - number
        return recent[-1 - behind] if 0 <= behind < len(recent) else None


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
    """A rank that never makes the call that `rank` is in; see [Note: certainty]."""
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
    """Whether a process is in a call of another group that `rank` has not made."""
    return beat.group != own.group and rank in members(beat.group) and not own.has_come(beat)


def places(ranks: Iterable[int], beats: Mapping[int, Heartbeat | None]) -> str:
    """Where ranks are, as a message shall say it."""
    told = [f"rank {rank} is {beats.get(rank) or 'not connected yet'}" for rank in ranks]
    more = len(told) - MOST_NAMED
    return "; ".join(told[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else []))
