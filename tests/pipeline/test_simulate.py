"""The simulation against published results and against an event simulation that shares nothing with it."""

import heapq
import random
from itertools import pairwise, product

import pytest

from echelon.pipeline.action import Action, Op, Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from echelon.pipeline.simulate import Costs, Span, Timeline, simulate

from .small_schedules import cases, chunks_of, random_schedule, written

SIZES = list(product(range(1, 7), range(1, 13)))
COSTS = [
    Costs(),
    Costs(forward=1, backward_input=0.5, backward_weight=0.5),
    Costs(forward=3, backward_input=2.5, backward_weight=1),
    Costs(forward=1, backward_input=1.5, backward_weight=2),
]


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("costs", COSTS)
def test_the_bubble_is_ranks_less_one_over_microbatches(build, costs: Costs) -> None:
    for p, m in SIZES:
        assert simulate(build(p, m), costs).bubble == pytest.approx((p - 1) / m, abs=1e-12)


@pytest.mark.parametrize("build", [gpipe, interleaved])
@pytest.mark.parametrize("costs", COSTS)
def test_chunks_divide_the_bubble(build, costs: Costs) -> None:
    """Also where the ranks do not divide the microbatches, as long as there are no fewer."""
    for (p, m), v in product(SIZES, range(1, 5)):
        if m >= p:
            timeline = simulate(build(p, m, v), costs.per_chunk(v))
            assert timeline.bubble == pytest.approx((p - 1) / (v * m), abs=1e-12), (p, m, v)


@pytest.mark.parametrize("costs", COSTS)
def test_interleaved_with_fewer_microbatches_than_ranks_ends_as_early_as_any_order_can(costs: Costs) -> None:
    """The last stage has all microbatches to do; before it stand all other stages once, and after it."""
    for (p, m), v in product(SIZES, range(1, 5)):
        if m <= p:
            timeline = simulate(interleaved(p, m, v), costs)
            assert timeline.end == pytest.approx(
                (v * p - 1 + m) * (costs.of(Op.FORWARD) + costs.of(Op.BACKWARD))
            )


@pytest.mark.parametrize("costs", [costs for costs in COSTS if costs.backward_weight <= 1])
def test_zbh1_saves_twice_the_weight_gradients_of_the_other_ranks(costs: Costs) -> None:
    """Where m >= p and W is not longer than F or I: they then fit where 1F1B waits."""
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    for p, m in SIZES:
        if m < p:
            continue
        whole, split = simulate(one_f_one_b(p, m), costs), simulate(zero_bubble_h1(p, m), costs)
        for rank in range(p):
            assert whole.idle(rank) == pytest.approx((p - 1) * (f + i + w), abs=1e-9)
            assert split.idle(rank) == pytest.approx((p - 1) * (f + i - w), abs=1e-9)


@pytest.mark.parametrize("costs", COSTS)
def test_no_zero_bubble_schedule_is_longer_than_one_f_one_b(costs: Costs) -> None:
    for p, m in SIZES:
        assert simulate(zero_bubble_h1(p, m), costs).end <= simulate(one_f_one_b(p, m), costs).end + 1e-9
        v_shaped = simulate(zero_bubble_v(p, m), costs.per_chunk(2))
        assert v_shaped.end <= simulate(one_f_one_b(p, m), costs).end + 1e-9


def own_idle(timeline: Timeline, rank: int) -> float:
    """Between its own first and last computation."""
    spans = timeline.spans[rank]
    return sum(after.start - before.end for before, after in pairwise(spans))


def test_zbv_waits_only_until_a_rank_has_its_first_microbatch() -> None:
    for p in range(1, 9):
        for m in range(2 * p - 1, 2 * p + 8):
            timeline = simulate(zero_bubble_v(p, m), Costs())
            assert [own_idle(timeline, rank) for rank in range(p)] == [0] * p
            assert [spans[0].start for spans in timeline.spans] == list(range(p))
            assert [timeline.idle(rank) for rank in range(p)] == [p - 1] * p
        assert p == 1 or any(
            own_idle(simulate(zero_bubble_v(p, 2 * p - 2), Costs()), rank) for rank in range(p)
        )
    assert simulate(zero_bubble_v(4, 8), Costs()).idle(0) == 3


def test_gpipe_holds_the_activations_of_all_microbatches() -> None:
    for (p, m), v in product(SIZES, range(1, 4)):
        timeline = simulate(gpipe(p, m, v), Costs())
        assert timeline.peak_activations == [m * v] * p
        assert timeline.peak_shares == [m] * p


def test_one_f_one_b_holds_the_activations_of_the_ranks_left() -> None:
    for p, m in SIZES:
        peak = simulate(one_f_one_b(p, m), Costs()).peak_activations
        assert peak == [min(p - rank, m) for rank in range(p)]


def test_interleaved_holds_a_little_more_than_one_f_one_b() -> None:
    for p, v, groups in product(range(1, 7), range(2, 5), range(2, 5)):
        timeline = simulate(interleaved(p, groups * p, v), Costs())
        assert timeline.peak_shares[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
        assert timeline.peak_activations == [(v - 1) * p + 2 * (p - rank) - 1 for rank in range(p)]


def test_interleaved_holds_more_where_ranks_do_not_divide_microbatches() -> None:
    for (p, m), v in product(SIZES, range(2, 5)):
        largest = -(-m // max(1, m // p))
        peak = simulate(interleaved(p, m, v), Costs()).peak_activations
        assert peak == [min(m * v, (v - 1) * largest + 2 * (p - rank) - 1) for rank in range(p)]


@pytest.mark.parametrize("costs", COSTS)
def test_zero_bubble_schedules_hold_what_the_first_rank_of_one_f_one_b_does(costs: Costs) -> None:
    for p, m in SIZES:
        assert simulate(zero_bubble_h1(p, m), costs).peak_activations == [min(p, m)] * p
        timeline = simulate(zero_bubble_v(p, m), costs)
        assert max(timeline.peak_activations) == min(2 * p, 2 * m)
        assert max(timeline.peak_shares) == min(p, m)


def test_activations_of_a_split_backward_are_held_until_the_weight_gradients() -> None:
    assert simulate(written("0F0 0I0 0F1 0I1 0W0 0W1"), Costs()).peak_activations == [2]
    assert simulate(written("0F0 0I0 0W0 0F1 0I1 0W1"), Costs()).peak_activations == [1]


def random_cases(generator: random.Random, name: str, count: int) -> list[Schedule]:
    return [
        build_schedule(
            name, generator.randint(1, 8), generator.randint(1, 16), generator.choice(chunks_of(name))
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_event_simulation_agrees(name: str) -> None:
    generator = random.Random(name)
    for compute in random_cases(generator, name, 80):
        costs = random_costs(generator)
        timeline = simulate(compute, costs)
        assert timeline.spans == event_spans(compute, costs)
        assert timeline.peak_activations == event_peaks(timeline.spans)


def test_an_event_simulation_agrees_on_random_orders_and_placements() -> None:
    generator = random.Random(0)
    for _ in range(200):
        compute, _ = random_schedule(generator)
        costs = random_costs(generator)
        timeline = simulate(compute, costs)
        assert timeline.spans == event_spans(compute, costs)
        assert timeline.peak_activations == event_peaks(timeline.spans)


def random_costs(generator: random.Random) -> Costs:
    forward, backward_input, backward_weight = (generator.uniform(0.1, 4) for _ in range(3))
    send = generator.choice([0.0, generator.uniform(0, 3)])
    return Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight, send=send)


def event_spans(schedule: Schedule, costs: Costs) -> list[list[Span]]:
    """Events in order of time: a computation begins when the last thing that it waits for has come."""
    duration = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    duration["B"] = costs.backward_input + costs.backward_weight
    waiting: dict[str, int] = {}
    followers: dict[str, list[tuple[str, float]]] = {}
    where = {repr(action): rank for rank, actions in enumerate(schedule) for action in actions}
    for actions in schedule:
        for index, action in enumerate(actions):
            before = [repr(actions[index - 1])] if index else []
            needs = [(need, 0.0) for need in before] + [
                (need, costs.send if where[need] != where[repr(action)] else 0.0)
                for need in needs_of(action)
                if need in where
            ]
            waiting[repr(action)] = len(needs)
            for need, delay in needs:
                followers.setdefault(need, []).append((repr(action), delay))
    started: dict[str, tuple[float, float]] = {}
    coming = [(0.0, name) for name, count in waiting.items() if count == 0]
    waiting = {name: max(count, 1) for name, count in waiting.items()}
    heapq.heapify(coming)
    while coming:
        time, name = heapq.heappop(coming)
        waiting[name] -= 1
        if waiting[name] == 0:
            end = time + duration[name.strip("0123456789")]
            started[name] = (time, end)
            for follower, delay in followers.get(name, []):
                heapq.heappush(coming, (end + delay, follower))
    return [[Span(action, *started[repr(action)]) for action in actions] for actions in schedule]


def needs_of(action: Action) -> list[str]:
    """What might have to be over, as it prints; some of it is in no schedule."""
    kind, stage, microbatch = action.op.value, action.stage, action.microbatch
    if kind == "W":
        return [f"{stage}I{microbatch}"]
    if kind == "F":
        return [f"{stage - 1}F{microbatch}"]
    return [f"{stage}F{microbatch}", f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"]


def event_peaks(spans: list[list[Span]]) -> list[int]:
    """Activations held at every moment, counted from the clock; what ends then is gone before what starts."""
    peaks = []
    for own in spans:
        changes = [(span.start, 1) for span in own if span.action.op.value == "F"]
        changes += [(span.end, -1) for span in own if span.action.op.value in "BW"]
        held = [sum(change for _, change in sorted(changes)[: index + 1]) for index in range(len(changes))]
        peaks.append(max(held, default=0))
    return peaks


def test_sends_and_receives_in_the_schedule_change_nothing() -> None:
    costs = Costs(send=0.25)
    for name, p, m, v in cases(4, 5):
        compute = build_schedule(name, p, m, v)
        for ahead in (True, False):
            assert simulate(with_communication(compute, ahead=ahead), costs) == simulate(compute, costs)


def test_evaluation_holds_one_microbatch_and_fills_once() -> None:
    timeline = simulate(forward_only(one_f_one_b(4, 6)), Costs(forward=2))
    assert timeline.peak_activations == [1] * 4
    assert timeline.end == 2 * (6 + 3)
    assert timeline.idle(0) == timeline.idle(3) == 2 * 3
    assert own_idle(timeline, 0) == own_idle(timeline, 3) == 0


def test_spans_stand_where_a_hand_drawn_timeline_has_them() -> None:
    timeline = simulate(
        one_f_one_b(2, 2), Costs(forward=1, backward_input=1.25, backward_weight=0.75, send=0.5)
    )
    assert timeline.spans == [
        [
            Span(Action(Op.FORWARD, 0, 0), 0, 1),
            Span(Action(Op.FORWARD, 0, 1), 1, 2),
            Span(Action(Op.BACKWARD, 0, 0), 5, 7),
            Span(Action(Op.BACKWARD, 0, 1), 8, 10),
        ],
        [
            Span(Action(Op.FORWARD, 1, 0), 1.5, 2.5),
            Span(Action(Op.BACKWARD, 1, 0), 2.5, 4.5),
            Span(Action(Op.FORWARD, 1, 1), 4.5, 5.5),
            Span(Action(Op.BACKWARD, 1, 1), 5.5, 7.5),
        ],
    ]
    assert timeline.end == 10
    assert timeline.bubble == pytest.approx(8 / 12)
    assert [timeline.idle(rank) for rank in range(2)] == [4, 4]
    assert [own_idle(timeline, rank) for rank in range(2)] == [4, 0]


def test_a_split_backward_lets_the_stage_before_go_on_earlier() -> None:
    timeline = simulate(written("0F0 0I0 0W0", "1F0 1I0 1W0"), Costs(backward_input=2, backward_weight=3))
    assert [span.start for span in timeline.spans[0]] == [0, 4, 6]
    whole = simulate(written("0F0 0B0", "1F0 1B0"), Costs(backward_input=2, backward_weight=3))
    assert [span.start for span in whole.spans[0]] == [0, 7]


def test_a_rank_without_work_is_idle_all_the_time() -> None:
    timeline = simulate([*written("0F0 0B0"), []], Costs())
    assert (timeline.idle(1), own_idle(timeline, 1)) == (3, 0)
    assert timeline.peak_activations == timeline.peak_shares == [1, 0]
    assert timeline.bubble == 1


def test_a_schedule_that_cannot_go_on_is_refused() -> None:
    schedule = gpipe(2, 1)
    schedule[1].reverse()
    with pytest.raises(ValueError, match="deadlocks: 0B0, 1B0 can never start"):
        simulate(schedule, Costs())


def test_costs_per_chunk_leave_the_transfers() -> None:
    costs = Costs(forward=2, backward_input=3, backward_weight=5, send=7)
    assert costs.per_chunk(2) == Costs(forward=1, backward_input=1.5, backward_weight=2.5, send=7)
    assert [costs.of(op) for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)] == [
        2,
        8,
        3,
        5,
    ]


@pytest.mark.parametrize(
    "wrong", [{"forward": 0}, {"backward_input": -1}, {"backward_weight": 0}, {"send": -0.1}]
)
def test_costs_that_are_no_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="computations must cost more than 0, and send not less than 0"):
        Costs(**wrong)
