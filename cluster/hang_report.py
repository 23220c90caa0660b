"""A report of a run that hangs: where every rank is, for how long, and the likely cause.

[Note: what is concluded] The cause is a guess from the latest heartbeats, in this order: a rank that failed, died or
left; one whose data has ended; one in another call; one that is outside of calls; one in another collective of a group,
or with other sizes; one that computes while the others wait; one in a collective of another group; one whose transfer
keeps it from a collective. What is certain is an `UnmatchedCall` or a `RankFailure`.
"""

from collections.abc import Iterator, Mapping, Sequence

from .heartbeats import MOST_NAMED, Event, Heartbeat, absent_ranks, members, unmatched_call
from .whereabouts import Place


def hang_report(rank: int, beats: Mapping[int, Heartbeat | None], events: Sequence[Event] = ()) -> str:
    """Return the report of a rank that waits: the likely cause, and a line for the ranks of each place.

    Args:
        rank: this rank.
        beats: the latest heartbeats of all ranks.
        events: failures of other ranks, oldest first.
    """
    ranks_by_place: dict[str, list[int]] = {}
    waited: dict[str, float] = {}
    for other, beat in sorted(beats.items()):
        text = "not connected yet" if beat is None else described_place(beat)
        ranks_by_place.setdefault(text, []).append(other)
        waited[text] = max(waited.get(text, 0.0), 0.0 if beat is None else beat.waited)
    lines = [f"- {named(ranks)}, for {waited[text]:.0f} s: {text}" for text, ranks in ranks_by_place.items()]
    if len(lines) > MOST_NAMED:
        lines = [*lines[:MOST_NAMED], f"- and {len(lines) - MOST_NAMED} more places"]
    return "\n".join((f"likely cause: {likely_cause(rank, beats, events)}", *lines))


def described_place(beat: Heartbeat) -> str:
    """Describe the call of a heartbeat and the place in it."""
    place = "" if beat.place is None else str(beat.place)
    return f"{beat}, {place}" if place else str(beat)


def named(ranks: Sequence[int]) -> str:
    """Name ranks, neighbours as a range."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and stretches[-1][-1] == rank - 1:
            stretches[-1].append(rank)
        else:
            stretches.append([rank])
    texts = [str(stretch[0]) if len(stretch) == 1 else f"{stretch[0]}-{stretch[-1]}" for stretch in stretches]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def likely_cause(rank: int, beats: Mapping[int, Heartbeat | None], events: Sequence[Event]) -> str:
    """Guess why a rank waits; see [Note: what is concluded]."""
    first = [event for event in events if event.rank != rank and not event.consequence]
    if first:
        return str(first[0])
    alive = {other: beat for other, beat in beats.items() if beat is not None}
    if unconnected := sorted(beats.keys() - alive.keys()):
        return f"{named(unconnected)} has not started, or imports still"
    waiting = alive[rank]
    absent = absent_ranks(rank, beats) if members(waiting.group) else []
    ended = [other for other in sorted(alive) if alive[other].data_has_ended]
    if 0 < len(ended) < len(alive):
        return f"{named(ended)} ran out of batches: every rank must get equally many"
    if (unmatched := unmatched_call(rank, beats)) is not None and unmatched.rank is not None:
        other = alive[unmatched.rank]
        what = (
            "has another batch" if other.action == waiting.action else f"is in another call, {other.action}"
        )
        return f"rank {unmatched.rank} {what}"
    if elsewhere := [other for other in absent if alive[other].action is not None]:
        return f"{named(elsewhere)} is in another call, {alive[elsewhere[0]].action}"
    if absent:
        place = alive[absent[0]].place
        where = "in its dataloader" if place and place.is_in_data else "outside of Echelon"
        line = f", at {place.line}" if place and place.line else ""
        return f"{named(absent)} has not made this call, and is {where}{line}"
    return (
        _of_one_group(alive)
        or _of_one_that_computes(alive)
        or _of_two_groups(alive)
        or _of_one_in_a_transfer(alive)
        or (
            "all ranks wait in the same call: look at the network, or give the process group a longer timeout"
        )
    )


def _pairs(beats: Mapping[int, Heartbeat]) -> Iterator[tuple[int, Place, int, Place]]:
    """Yield each rank in a collective with each other member of its group, and the places of both."""
    places = {rank: beat.place for rank, beat in beats.items() if beat.place is not None}
    for rank, place in places.items():
        if place.collective and len(place.waits_for) > 1:
            for other in place.waits_for:
                if other in places and other != rank:
                    yield rank, place, other, places[other]


def _of_one_group(beats: Mapping[int, Heartbeat]) -> str:
    """Compare the collectives of ranks that wait in one group; empty if they are equal."""
    for rank, place, other, there in _pairs(beats):
        if {*there.waits_for} != {*place.waits_for}:
            continue
        if there.collective and there.collective != place.collective:
            return _in_another(rank, place, other, there)
        if there.collective and there.sizes != place.sizes:
            return (
                f"rank {rank} has {place.sizes} in {place.collective} and rank {other} has {there.sizes}: shapes "
                "and dtypes must be equal"
            )
    for _, place, other, there in _pairs(beats):
        if not there.collective and not there.waits_for:
            return f"rank {other} does not join {place.collective}, and is at {there or 'an unknown place'}"
    return ""


def _of_two_groups(beats: Mapping[int, Heartbeat]) -> str:
    """Name two ranks that wait for each other in collectives of two groups; empty if there are none."""
    for rank, place, other, there in _pairs(beats):
        if there.collective and there.collective != place.collective:
            return _in_another(rank, place, other, there)
    return ""


def _in_another(rank: int, place: Place, other: int, there: Place) -> str:
    return f"rank {rank} is in {place.collective} and rank {other} in another collective, {there.collective}"


def _of_one_that_computes(beats: Mapping[int, Heartbeat]) -> str:
    """Name the ranks for which others wait while they wait for none; empty if there are none."""
    awaited = {other for beat in beats.values() if beat.place is not None for other in beat.place.waits_for}
    busy = [
        rank
        for rank in sorted(awaited & beats.keys())
        if (place := beats[rank].place) is not None and not place.waits_for
    ]
    if not busy:
        return ""
    return f"{named(busy)} computes or waits elsewhere, at {beats[busy[0]].place}"


def _of_one_in_a_transfer(beats: Mapping[int, Heartbeat]) -> str:
    """Name a rank that waits in a transfer while another waits for it in a collective; empty if there is none."""
    for rank, place, other, there in _pairs(beats):
        if not there.collective:
            return (
                f"rank {other} cannot join {place.collective}, in which rank {rank} waits at {place.line}, and is at "
                f"{there}: use a collective of ranks that compute at the same time, as those of one stage"
            )
    return ""
