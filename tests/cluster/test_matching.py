"""Of two heartbeats only what is certain is concluded; see echelon/cluster/heartbeats.py."""

from dataclasses import replace

from echelon.cluster.heartbeats import Heartbeat, absent_ranks, unmatched_call

WORLD, PAIR = "0,1,2", "0,1"


def beat(action: str | None, group: str = "", *, errors: int = 0, **made: list[str]) -> Heartbeat:
    """A heartbeat after the calls that were made of the world and of the pair."""
    recent = {{"world": WORLD, "pair": PAIR}[name]: calls for name, calls in made.items()}
    joined = {name: len(calls) for name, calls in recent.items()}
    calls = sum(joined.values())
    return Heartbeat(
        beat=0, action=action, calls=calls, group=group, joined=joined, recent=recent, errors=errors
    )


def _named(rank: int, beats: dict[int, Heartbeat | None]) -> int | None:
    error = unmatched_call(rank, beats)
    return None if error is None else error.rank


def test_ranks_in_an_earlier_call_may_still_come() -> None:
    beats = {
        0: beat("save", WORLD, world=["step", "save"]),
        1: beat("step", WORLD, world=["step"]),
        2: beat(None, world=["step"]),
    }
    assert absent_ranks(0, beats) == [1, 2]
    assert _named(0, beats) is None
    assert _named(1, beats) is None
    texts = ["in save, call 2", "in step, call 1", "outside of Echelon, after call 1"]
    assert list(map(str, beats.values())) == texts


def test_two_names_of_one_call_never_meet() -> None:
    beats = {
        0: beat("save", WORLD, world=["step", "save"]),
        1: beat("load", WORLD, world=["step", "step", "load"]),
        2: None,
    }
    assert _named(0, beats) == 1
    assert _named(1, beats) is None  # the first has not made its third call
    assert absent_ranks(0, beats) == [2]


def test_calls_of_different_groups_that_wait_for_each_other_never_meet() -> None:
    beats = {
        0: beat("forward", PAIR, world=["step"], pair=["forward"]),
        1: beat("save", WORLD, world=["step", "save"]),
    }
    assert _named(0, beats) == 1
    assert _named(1, beats | {2: None}) == 0
    beats[1] = beat("save", WORLD, world=["step", "save"], pair=["forward"])  # it has been there
    assert _named(0, beats) is None


def test_nothing_is_certain_after_an_error_of_one_rank_or_in_the_same_call() -> None:
    heartbeat = beat("save", WORLD, world=["step", "save"])
    failed = beat("step", WORLD, world=["step", "step"], errors=1)
    for other in (failed, beat("save", WORLD, world=["step", "step", "save"])):
        assert _named(0, {0: heartbeat, 1: other, 2: None}) is None


def with_batch(batch: str, replica: str, world: list[str]) -> Heartbeat:
    return replace(beat(world[-1], WORLD, world=world), batch=batch, replica=replica)


def test_ranks_of_a_replica_with_other_batches_in_one_call_never_meet() -> None:
    beats = {
        0: with_batch("ids int64[4, 8]", PAIR, ["run"]),
        1: with_batch("ids int32[4, 8]", PAIR, ["run"]),
        2: with_batch("ids int64[4, 9]", "2,3", ["run"]),  # another replica has batches of its own
    }
    error = unmatched_call(0, beats)
    assert error is not None and error.rank == 1
    assert "int64[4, 8]" in str(error) and "int32[4, 8]" in str(error)
    assert _named(1, beats) == 0
    assert _named(2, beats) is None


def test_batches_of_different_calls_or_not_reported_yet_prove_nothing() -> None:
    heartbeat = with_batch("ids int64[4, 8]", PAIR, ["run"])
    for other in (with_batch("ids int64[4, 9]", PAIR, ["run", "run"]), with_batch("", PAIR, ["run"])):
        assert _named(0, {0: heartbeat, 1: other, 2: None}) is None
