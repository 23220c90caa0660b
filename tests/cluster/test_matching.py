"""Of two heartbeats only what is certain is concluded; see echelon/cluster/heartbeats.py."""

from echelon.cluster.heartbeats import Heartbeat, absent_ranks, never_meeting, places

WORLD, PAIR = "0,1,2", "0,1"


def beat(action: str | None, group: str = "", *, errors: int = 0, **made: list[str]) -> Heartbeat:
    """A heartbeat after the calls that were made of the world and of the pair."""
    recent = {{"world": WORLD, "pair": PAIR}[name]: calls for name, calls in made.items()}
    joined = {name: len(calls) for name, calls in recent.items()}
    calls = sum(joined.values())
    return Heartbeat(
        beat=0, action=action, calls=calls, group=group, joined=joined, recent=recent, errors=errors
    )


def test_ranks_in_an_earlier_call_may_still_come() -> None:
    beats = {
        0: beat("save", WORLD, world=["step", "save"]),
        1: beat("step", WORLD, world=["step"]),
        2: beat(None, world=["step"]),
    }
    assert absent_ranks(0, beats) == [1, 2]
    assert never_meeting(0, beats) is None
    assert never_meeting(1, beats) is None
    assert places([1, 2], beats) == "rank 1 is in step, call 1; rank 2 is outside of Echelon, after call 1"


def test_two_names_of_one_call_never_meet() -> None:
    beats = {
        0: beat("save", WORLD, world=["step", "save"]),
        1: beat("load", WORLD, world=["step", "step", "load"]),
        2: None,
    }
    assert never_meeting(0, beats) == 1
    assert never_meeting(1, beats) is None  # the first has not made its third call
    assert absent_ranks(0, beats) == [2]


def test_calls_of_different_groups_that_wait_for_each_other_never_meet() -> None:
    beats = {
        0: beat("forward", PAIR, world=["step"], pair=["forward"]),
        1: beat("save", WORLD, world=["step", "save"]),
    }
    assert never_meeting(0, beats) == 1
    assert never_meeting(1, beats | {2: None}) == 0
    beats[1] = beat("save", WORLD, world=["step", "save"], pair=["forward"])  # it has been there
    assert never_meeting(0, beats) is None


def test_nothing_is_certain_after_an_error_of_one_rank_or_in_the_same_call() -> None:
    own = beat("save", WORLD, world=["step", "save"])
    assert (
        never_meeting(0, {0: own, 1: beat("step", WORLD, world=["step", "step"], errors=1), 2: None}) is None
    )
    assert never_meeting(0, {0: own, 1: beat("save", WORLD, world=["step", "step", "save"]), 2: None}) is None
