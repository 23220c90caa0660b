"""Orders of computations, which styles there are, and what becomes of schedules that a user wrote."""

from itertools import product

import pytest

from echelon.pipeline.action import Action, Op, Schedule, placement
from echelon.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    stage_placement,
    style_errors,
    zero_bubble_h1,
    zero_bubble_v,
)
from echelon.pipeline.validate import own_schedule_errors

from .small_schedules import cases, chunks_of, written


def test_an_action_prints_as_stage_op_microbatch() -> None:
    assert repr(Action(Op.FORWARD, 2, 3)) == "2F3"
    assert repr([Action(Op.BACKWARD_INPUT, 0, 1), Action(Op.RECV_BACKWARD, 0, 1)]) == "[0I1, 0rB1]"


def test_gpipe_runs_all_forwards_before_all_backwards() -> None:
    assert gpipe(2, 3) == written("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    assert gpipe(2, 2, 2) == written("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")


def test_one_f_one_b_alternates_after_its_warmup() -> None:
    assert one_f_one_b(3, 4) == written(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_one_f_one_b_works_with_fewer_microbatches_than_ranks() -> None:
    assert one_f_one_b(4, 1) == written("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0")


def test_interleaved_has_the_order_of_the_published_figure() -> None:
    """Figure 4 of arXiv:2104.04473: 4 ranks, 2 chunks, 8 microbatches; first and last rank."""
    schedule = interleaved(4, 8, 2)
    assert (
        schedule[0]
        == written(
            "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1"
            " 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
        )[0]
    )
    assert (
        schedule[3]
        == written(
            "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3"
            " 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7"
        )[0]
    )


def test_interleaved_takes_the_most_equal_groups_of_at_least_the_ranks() -> None:
    (last,) = (actions for actions in interleaved(2, 5, 2) if actions[0].stage == 1)
    forwards = [action for action in last if action.op is Op.FORWARD]
    assert forwards == written("1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4")[0]


def test_interleaved_with_one_chunk_is_one_f_one_b() -> None:
    for p, m in product(range(1, 7), range(1, 13)):
        assert interleaved(p, m, 1) == one_f_one_b(p, m)


def test_zbh1_holds_back_as_many_weight_gradients_as_ranks_stand_before() -> None:
    assert zero_bubble_h1(3, 4) == written(
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    )


def test_zbv_goes_there_and_back() -> None:
    assert zero_bubble_v(2, 4) == written(
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    )
    assert zero_bubble_v(2, 1) == written("0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 2W0 1I0 1W0")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(0, 1), (1, 0), (-1, 4)])
def test_sizes_below_one_are_refused(name: str, num_ranks: int, num_microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"a schedule cannot have (-1|0) \w+.*: each must be at least 1"):
        SCHEDULES[name].build(num_ranks, num_microbatches, 1)


@pytest.mark.parametrize("build", [gpipe, interleaved])
def test_a_rank_without_a_chunk_is_refused(build) -> None:
    with pytest.raises(ValueError, match="0 chunks per rank"):
        build(2, 2, 0)


def test_forwards_of_a_schedule_stay_in_order() -> None:
    assert forward_only(zero_bubble_v(2, 2)) == written("0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1")


def test_a_style_makes_its_own_number_of_chunks() -> None:
    own = {"gpipe": None, "1f1b": 1, "interleaved": None, "zbh1": 1, "zbv": 2}
    assert {name: style.chunks for name, style in SCHEDULES.items()} == own
    for name, p, m, v in cases(4, 5):
        for num_chunks in {v, 1 if own[name] else v}:
            assert style_errors(name, num_chunks, p) == []
            schedule = build_schedule(name, p, m, num_chunks)
            assert [len({action.stage for action in actions}) for actions in schedule] == [v] * p


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_placement_is_the_same_for_any_number_of_microbatches(name: str) -> None:
    for p, v in product(range(1, 6), chunks_of(name)):
        there_and_back = [*range(p), *reversed(range(p))]
        expected = there_and_back if name == "zbv" else [stage % p for stage in range(p * v)]
        assert stage_placement(name, p, v) == tuple(expected)
        for m in (1, 2, 7):
            assert placement(build_schedule(name, p, m, v)) == tuple(expected)


@pytest.mark.parametrize(
    "name, num_chunks, fault",
    [
        (
            "1F1B",
            1,
            r"there is no schedule '1F1B': use one of 'gpipe', '1f1b', 'interleaved', 'zbh1', 'zbv', or",
        ),
        (
            "1f1b",
            2,
            r"'1f1b' has 1 stage per rank and cannot have num_model_chunks=2: 'gpipe' and 'interleaved' take",
        ),
        ("zbh1", 2, r"'zbh1' has 1 stage per rank"),
        ("zbv", 3, r"'zbv' has 2 stages per rank"),
        ("interleaved", 0, r"num_model_chunks=0: a rank has at least 1 stage"),
    ],
)
def test_a_style_that_cannot_be_had_is_told(name: str, num_chunks: int, fault: str) -> None:
    (told,) = style_errors(name, num_chunks, 2)
    with pytest.raises(ValueError, match=fault) as caught:
        build_schedule(name, 2, 4, num_chunks)
    assert str(caught.value) == told
    with pytest.raises(ValueError, match=fault):
        stage_placement(name, 2, num_chunks)


OWN = written("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1")


def test_a_schedule_of_ones_own_is_taken() -> None:
    assert style_errors(OWN, 1, 2) == []
    assert build_schedule(OWN, 2, 2, 1) == OWN
    assert stage_placement(OWN, 2, 1) == (0, 1, 0)


def test_a_function_of_ones_own_is_taken_for_any_number_of_microbatches() -> None:
    assert style_errors(zero_bubble_v, 2, 3) == style_errors(zero_bubble_v, 1, 3) == []
    assert stage_placement(zero_bubble_v, 3, 1) == (0, 1, 2, 2, 1, 0)
    for m in (1, 2, 9):
        assert build_schedule(zero_bubble_v, 3, m, 1) == zero_bubble_v(3, m)


@pytest.mark.parametrize(
    "schedule, fault",
    [
        (None, "a schedule is a list with a list of actions for every rank, not None"),
        ([None, []], "a schedule is a list with a list of actions for every rank"),
        ([[("F", 0, 0)], []], r"is made of Action\(Op, stage, microbatch\), and it has \('F', 0, 0\)"),
        ([[Action(Op.FORWARD, 0.5, 0)]], "is made of Action"),
        ([[Action("F", 0, 0)]], "is made of Action"),
        (
            written("0F0 0sF0 0rB0 0B0", "1rF0 1F0 1B0 1sB0"),
            "the schedule has 0sF0: leave sends and receives out",
        ),
        ([[], []], "the schedule has no backward"),
        (written("0F0", "1F0"), "the schedule has no backward: write the one for training"),
        (written("0F0 0B0"), "the schedule is for 1 ranks, and the pipeline has 2"),
        (written("0F0 0B0", ""), "the schedule gives rank 1 nothing to do"),
        (written("0F0 0F1 0B0", "1F0 1F1 1B0 1B1"), "the schedule is not valid: rank 0 lacks 0B1"),
        (written("0F0 2F0 2B0 0B0", "3F0 3B0"), "no rank holds stage 1"),
        (
            written("0F0 0F1 0B0 0B1", "1F1 1F0 1B1 0F0 1B0"),
            r"stage 0 is held by rank 0 \(0F0\) and by rank 1",
        ),
        (written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "the schedule deadlocks: rank 0 stands at 0B0"),
        (written("0F0 0W0 0I0", "1F0 1B0"), r"rank 0 stands at 0W0, which needs 0I0 \(later on rank 0\)"),
        (written("1F0 1B0", "0F0 0B0 2F0"), "the schedule is not valid: rank 1 lacks 2B0"),
        (written("0F0 0I0 0W0 0F1 0B1", "1F0 1I0 1F1 1B1"), "the schedule is not valid: rank 1 lacks 1W0"),
        (written("0F0 0W0 0F1 0B1", "1F0 1B0 1F1 1B1"), "the schedule is not valid: rank 0 lacks 0I0"),
        (
            written("0F0 0B0 0W0", "1F0 1B0"),
            "there are 0B0 and 0W0: a backward is done whole or in its two parts",
        ),
        (written("0F0 0B0 1W0", "1F0 1I0 1W0"), "rank 0 has 1W0, which belongs to rank 1"),
    ],
)
def test_a_schedule_of_ones_own_that_cannot_run_is_told(schedule: Schedule, fault: str) -> None:
    told = style_errors(schedule, 1, 2)
    with pytest.raises(ValueError, match=fault) as caught:
        build_schedule(schedule, 2, 1 + max(_microbatches(schedule)), 1)
    assert str(caught.value) == "; ".join(told)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 3), (3, 2)])
def test_every_computation_that_is_dropped_repeated_or_moved_is_named(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    right = build_schedule(name, num_ranks, num_microbatches, chunks_of(name)[-1])
    for rank, actions in enumerate(right):
        for index, action in enumerate(actions):
            dropped, repeated, moved = ([list(others) for others in right] for _ in range(3))
            del dropped[rank][index]
            repeated[rank].insert(index, action)
            moved[rank - 1].append(moved[rank].pop(index))
            for broken, error in (
                (dropped, f"rank {rank} lacks {action}"),
                (repeated, f"rank {rank} has {action} 2 times"),
                (moved, f"rank {(rank - 1) % num_ranks} has {action}, which belongs to rank {rank}"),
            ):
                (told,) = own_schedule_errors(broken, num_ranks, num_microbatches, 1)
                is_on_two_ranks = "is held by" in told and broken is moved
                assert error in told or is_on_two_ranks, told


def _microbatches(schedule: object) -> list[int]:
    actions = [action for own in schedule or [] for action in own or []] if isinstance(schedule, list) else []
    return [action[2] for action in actions] or [-1]


def test_a_fixed_schedule_is_for_one_number_of_microbatches() -> None:
    with pytest.raises(
        ValueError, match="the schedule is for 2 microbatches, and a step has 3: give a function"
    ):
        build_schedule(OWN, 2, 3, 1)


def test_chunks_that_a_schedule_of_ones_own_does_not_have_are_told() -> None:
    assert style_errors(OWN, 2, 2) == [
        "num_model_chunks=2, and the schedule's ranks have [2, 1] stages: leave it out"
    ]
    assert style_errors(gpipe(2, 2, 3), 3, 2) == []


def test_all_that_is_wrong_with_its_sizes_is_told_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"for 2 ranks, and the pipeline has 3; .* 2 microbatches.*; num_model_chunks=5"
    ):
        build_schedule(OWN, 3, 4, 5)


def test_a_function_that_fails_or_ignores_its_numbers_is_told() -> None:
    def only_pairs(num_ranks: int, num_microbatches: int) -> Schedule:
        raise ValueError("microbatches must come in threes")

    assert style_errors(only_pairs, 1, 2) == [
        "the schedule's function fails for 2 ranks and 4 microbatches: ValueError: microbatches must come in threes"
    ]
    assert "TypeError" in style_errors(lambda p: OWN, 1, 2)[0]  # type: ignore[arg-type, misc]
    assert "2 ranks and 3 microbatches" in style_errors(only_pairs, 1, 2, 3)[0]
    assert style_errors(lambda p, m: OWN, 1, 2, 2) == []
    with pytest.raises(ValueError, match="fails for 2 ranks and 5 microbatches: ZeroDivisionError"):
        build_schedule(lambda p, m: OWN if m == 2 else 1 // 0, 2, 5, 1)
    assert "the schedule is for 2 microbatches, and a step has 4" in style_errors(lambda p, m: OWN, 1, 2)[0]


def test_a_function_that_places_stages_by_the_number_of_microbatches_is_refused() -> None:
    def turning(num_ranks: int, num_microbatches: int) -> Schedule:
        schedule = one_f_one_b(num_ranks, num_microbatches)
        return schedule if num_microbatches % 2 == 0 else schedule[::-1]

    assert build_schedule(turning, 2, 6, 1, usual_placement=(0, 1)) == one_f_one_b(2, 6)
    with pytest.raises(
        ValueError, match=r"on ranks \(1, 0\) for 3 microbatches, and the model was cut for \(0, 1\)"
    ):
        build_schedule(turning, 2, 3, 1, usual_placement=(0, 1))


def test_absurd_numbers_are_told_shortly_and_at_once() -> None:
    for wild in (Action(Op.FORWARD, 0, 10**7), Action(Op.FORWARD, 10**7, 0), Action(Op.FORWARD, -1, 0)):
        (fault,) = style_errors([[*OWN[0], wild], OWN[1]], 1, 2)
        assert "cannot have so many stages or microbatches" in fault and len(fault) < 200
