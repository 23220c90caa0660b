"""Orders of computations, the built-in styles, and user schedules."""

from itertools import product
from typing import Any

import pytest

from echelon.pipeline.action import Action, Op, Schedule, stage_ranks
from echelon.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    build_stage_ranks,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    style_errors,
    zero_bubble_h1,
    zero_bubble_v,
)
from echelon.pipeline.validate import user_schedule_errors

from .small_schedules import cases, chunks_of, written

FORWARD, BACKWARD = Op.FORWARD, Op.BACKWARD
# The first and the last rank of figure 4 of arXiv:2104.04473 (4 ranks, 2 chunks, 8 microbatches).
PUBLISHED = [interleaved(4, 8, 2)[0], interleaved(4, 8, 2)[3]]
ORDERS: dict[str, tuple[Schedule, tuple[str, ...]]] = {
    "gpipe": (gpipe(2, 3), ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")),
    "gpipe of two chunks": (
        gpipe(2, 2, 2),
        ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
    ),
    "1f1b": (
        one_f_one_b(3, 4),
        (
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ),
    ),
    "1f1b of fewer microbatches than ranks": (
        one_f_one_b(4, 1),
        ("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"),
    ),
    "interleaved as published": (
        PUBLISHED,
        (
            "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1"
            " 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7",
            "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3"
            " 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7",
        ),
    ),
    "interleaved in the most equal groups": (
        forward_only(interleaved(2, 5, 2))[1:],
        ("1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4",),
    ),
    "zbh1": (
        zero_bubble_h1(3, 4),
        (
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
        ),
    ),
    "zbv": (
        zero_bubble_v(2, 4),
        (
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
        ),
    ),
    "zbv of one microbatch": (zero_bubble_v(2, 1), ("0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 2W0 1I0 1W0")),
    "forwards alone": (forward_only(zero_bubble_v(2, 2)), ("0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1")),
}


@pytest.mark.parametrize("name", ORDERS)
def test_schedules_have_the_published_orders(name: str) -> None:
    schedule, expected = ORDERS[name]
    assert [" ".join(map(repr, actions)) for actions in schedule] == list(expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_style_is_complete_and_places_stages_alike_for_any_number_of_microbatches(name: str) -> None:
    for style, p, m, v in cases(5, 9):
        if style == name:
            schedule = build_schedule(name, p, m, v)
            assert user_schedule_errors(schedule, p, m, v) == []
            there_and_back = [*range(p), *reversed(range(p))]
            expected = there_and_back if name == "zbv" else [stage % p for stage in range(p * v)]
            assert stage_ranks(schedule) == build_stage_ranks(name, p, v) == tuple(expected)
            if SCHEDULES[name].chunks is not None:
                assert build_schedule(name, p, m, 1) == schedule
    for p, m in product(range(1, 7), range(1, 13)):
        assert interleaved(p, m, 1) == one_f_one_b(p, m)


CUSTOM = written("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1")


def failing(num_ranks: int, num_microbatches: int) -> Schedule:
    raise ValueError("microbatches must come in threes")


def turning(num_ranks: int, num_microbatches: int) -> Schedule:
    """Place the stages depending on the number of microbatches."""
    schedule = one_f_one_b(num_ranks, num_microbatches)
    return schedule if num_microbatches % 2 == 0 else schedule[::-1]


def test_a_user_schedule_is_a_list_or_a_function() -> None:
    assert style_errors(CUSTOM, 1, 2) == style_errors(gpipe(2, 2, 3), 3, 2) == []
    assert build_schedule(CUSTOM, 2, 2, 1) == CUSTOM
    assert build_stage_ranks(CUSTOM, 2, 1) == (0, 1, 0)
    assert style_errors(zero_bubble_v, 2, 3) == style_errors(zero_bubble_v, 1, 3) == []
    assert style_errors(lambda p, m: CUSTOM, 1, 2, 2) == []
    assert build_stage_ranks(zero_bubble_v, 3, 1) == (0, 1, 2, 2, 1, 0)
    assert build_schedule(zero_bubble_v, 3, 9, 1) == zero_bubble_v(3, 9)
    assert build_schedule(turning, 2, 6, 1, required_stage_ranks=(0, 1)) == one_f_one_b(2, 6)


# The pp_style for 2 ranks, the chunks and the number of microbatches, and the error.
REFUSED: list[tuple[Any, int, int | None, str]] = [
    ("1F1B", 1, None, "there is no schedule '1F1B': use one of 'gpipe', '1f1b', "),
    ("1f1b", 2, None, "'1f1b' has 1 stage per rank and cannot have num_model_chunks=2: 'gpipe' and 'interleaved' take"),
    ("zbv", 3, None, "'zbv' has 2 stages per rank"),
    ("interleaved", 0, None, "num_model_chunks=0: a rank has at least 1 stage"),
    (None, 1, None, "a schedule is a list with a list of actions for every rank, not None"),
    ([None, []], 1, None, "a schedule is a list with a list of actions for every rank"),
    ([[("F", 0, 0)], []], 1, None, "must consist of Action(Op, stage, microbatch), but has ('F', 0, 0)"),
    ([[Action(FORWARD, 0.5, 0)]], 1, None, "must consist of Action"),  # type: ignore[arg-type]
    ([[Action("F", 0, 0)]], 1, None, "must consist of Action"),  # type: ignore[arg-type]
    *(
        (
            [[*CUSTOM[0], Action(FORWARD, stage, microbatch)], CUSTOM[1]],
            1,
            None,
            "cannot have so many stages or microbatches",
        )
        for stage, microbatch in ((0, 10**7), (10**7, 0), (-1, 0))
    ),
    (written("0F0 0sF0 0rB0 0B0", "1rF0 1F0 1B0 1sB0"), 1, None, "has 0sF0: leave sends and receives out"),
    (written("0F0", "1F0"), 1, None, "the schedule has no backward: give the schedule for training"),
    (written("0F0 0B0"), 1, None, "the schedule is for 1 ranks, and the pipeline has 2"),
    (written("0F0 0B0", ""), 1, None, "the schedule gives rank 1 no actions"),
    (written("0F0 0F1 0B0", "1F0 1F1 1B0 1B1"), 1, None, "the schedule is not valid: rank 0 lacks 0B1"),
    (written("0F0 2F0 2B0 0B0", "3F0 3B0"), 1, None, "no rank has stage 1"),
    (written("0F0 0F1 0B0 0B1", "1F1 1F0 1B1 0F0 1B0"), 1, None, "stage 0 is on rank 0 (0F0) and on rank 1"),
    (written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), 1, None, "the schedule deadlocks: rank 0 waits at 0B0"),
    (written("0F0 0W0 0I0", "1F0 1B0"), 1, None, "rank 0 waits at 0W0, which needs 0I0 (later on rank 0)"),
    (written("1F0 1B0", "0F0 0B0 2F0"), 1, None, "the schedule is not valid: rank 1 lacks 2B0"),
    (written("0F0 0I0 0W0 0F1 0B1", "1F0 1I0 1F1 1B1"), 1, None, "the schedule is not valid: rank 1 lacks 1W0"),
    (written("0F0 0F0 0B0", "1F0 1B0"), 1, None, "rank 0 has 0F0 2 times"),
    (written("0F0 0B0 0W0", "1F0 1B0"), 1, None, "there are 0B0 and 0W0: use either a full backward or its two"),
    (written("0F0 0B0 1W0", "1F0 1I0 1W0"), 1, None, "rank 0 has 1W0, which belongs to rank 1"),
    (CUSTOM, 1, 3, "the schedule is for 2 microbatches, and a step has 3: give a function"),
    (CUSTOM, 2, None, "num_model_chunks=2, and the schedule's ranks have [2, 1] stages: leave it out"),
    (failing, 1, None, "the schedule's function fails for 2 ranks and 4 microbatches: ValueError: microbatches"),
    (failing, 1, 3, "2 ranks and 3 microbatches"),
    (lambda p: CUSTOM, 1, None, "TypeError"),
    (lambda p, m: CUSTOM, 1, None, "the schedule is for 2 microbatches, and a step has 4"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_an_invalid_schedule_is_refused(number: int) -> None:
    style, chunks, microbatches, message = REFUSED[number]
    (error,) = style_errors(style, chunks, 2, microbatches)
    assert message in error and len(error) < 250
    with pytest.raises(ValueError) as caught:
        build_schedule(style, 2, microbatches, chunks)
    assert str(caught.value) == error


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_computation_that_is_dropped_repeated_or_moved_is_named(name: str) -> None:
    right = build_schedule(name, 2, 3, chunks_of(name)[-1])
    for rank, actions in enumerate(right):
        for index, action in enumerate(actions):
            dropped, repeated, moved = ([list(others) for others in right] for _ in range(3))
            del dropped[rank][index]
            repeated[rank].insert(index, action)
            moved[1 - rank].append(moved[rank].pop(index))
            assert f"rank {rank} lacks {action}" in user_schedule_errors(dropped, 2, 3, 1)[0]
            assert f"rank {rank} has {action} 2 times" in user_schedule_errors(repeated, 2, 3, 1)[0]
            (error,) = user_schedule_errors(moved, 2, 3, 1)
            belongs = f"rank {1 - rank} has {action}, which belongs to rank {rank}"
            assert belongs in error or "is on rank" in error
