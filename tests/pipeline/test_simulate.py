"""The simulation, compared with published results and with an independent event simulation."""

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

SIZES = list(product(range(1, 6), range(1, 11)))
COSTS = [
    Costs(),
    Costs(forward=1, backward_input=0.5, backward_weight=0.5),
    Costs(forward=3, backward_input=2.5, backward_weight=1),
    Costs(forward=1, backward_input=1.5, backward_weight=2),
]


@pytest.mark.parametrize("costs", COSTS)
def test_bubbles_are_the_published_ones(costs: Costs) -> None:
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    for p, m in SIZES:
        assert simulate(gpipe(p, m), costs).bubble == pytest.approx((p - 1) / m, abs=1e-12)
        unsplit = simulate(one_f_one_b(p, m), costs)
        assert unsplit.bubble == pytest.approx((p - 1) / m, abs=1e-12)
        split, v_shaped = (
            simulate(zero_bubble_h1(p, m), costs),
            simulate(zero_bubble_v(p, m), costs.per_chunk(2)),
        )
        assert max(split.end, v_shaped.end) <= unsplit.end + 1e-9
        for rank in range(p) if m >= p and w <= 1 else ():  # weight gradients fit into the bubble of 1F1B
            assert unsplit.idle(rank) == pytest.approx((p - 1) * (f + i + w), abs=1e-9)
            assert split.idle(rank) == pytest.approx((p - 1) * (f + i - w), abs=1e-9)
        for v in range(1, 5):
            chunk = costs.per_chunk(v)
            if m >= p:
                for build in (gpipe, interleaved):
                    bubble = simulate(build(p, m, v), chunk).bubble
                    assert bubble == pytest.approx((p - 1) / (v * m), abs=1e-12), (p, m, v)
            else:  # the last stage runs all microbatches; all other stages run once before it, and once after it
                end = (v * p - 1 + m) * (chunk.of(Op.FORWARD) + chunk.of(Op.BACKWARD))
                assert simulate(interleaved(p, m, v), chunk).end == pytest.approx(end)


def idle_within(timeline: Timeline, rank: int) -> float:
    """Return the idle time between a rank's first and last computation."""
    return sum(after.start - before.end for before, after in pairwise(timeline.spans[rank]))


def test_zbv_waits_only_until_a_rank_has_its_first_microbatch() -> None:
    for p in range(1, 9):
        for m in range(2 * p - 1, 2 * p + 8):
            timeline = simulate(zero_bubble_v(p, m), Costs())
            assert [idle_within(timeline, rank) for rank in range(p)] == [0] * p
            assert [spans[0].start for spans in timeline.spans] == list(range(p))
            assert [timeline.idle(rank) for rank in range(p)] == [p - 1] * p
        fewer = simulate(zero_bubble_v(p, 2 * p - 2), Costs()) if p > 1 else None
        assert fewer is None or any(idle_within(fewer, rank) for rank in range(p))


def test_peaks_of_activations_are_the_published_ones() -> None:
    for p, m in SIZES:
        assert simulate(one_f_one_b(p, m), Costs()).peak_activations == [min(p - r, m) for r in range(p)]
        for v in range(1, 4):
            timeline = simulate(gpipe(p, m, v), Costs())
            assert timeline.peak_activations == [m * v] * p and timeline.peak_shares == [m] * p
        for v in range(2, 5):
            largest = -(-m // max(1, m // p))
            timeline = simulate(interleaved(p, m, v), Costs())
            peaks = [min(m * v, (v - 1) * largest + 2 * (p - rank) - 1) for rank in range(p)]
            assert timeline.peak_activations == peaks
            if m % p == 0 and m > p:
                assert timeline.peak_shares[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
        for costs in COSTS:
            assert simulate(zero_bubble_h1(p, m), costs).peak_activations == [min(p, m)] * p
            timeline = simulate(zero_bubble_v(p, m), costs)
            assert max(timeline.peak_activations) == min(2 * p, 2 * m)
            assert max(timeline.peak_shares) == min(p, m)
    # Activations of a split backward are kept until its weight gradients.
    assert simulate(written("0F0 0I0 0F1 0I1 0W0 0W1"), Costs()).peak_activations == [2]
    assert simulate(written("0F0 0I0 0W0 0F1 0I1 0W1"), Costs()).peak_activations == [1]


def test_an_event_simulation_agrees() -> None:
    generator = random.Random(0)
    for number in range(400):
        name = generator.choice([*SCHEDULES])
        p, m, v = generator.randint(1, 8), generator.randint(1, 16), generator.choice(chunks_of(name))
        compute = build_schedule(name, p, m, v) if number % 2 else random_schedule(generator)[0]
        forward, backward_input, backward_weight = (generator.uniform(0.1, 4) for _ in range(3))
        send = generator.choice([0.0, generator.uniform(0, 3)])
        costs = Costs(
            forward=forward, backward_input=backward_input, backward_weight=backward_weight, send=send
        )
        timeline = simulate(compute, costs)
        assert timeline.spans == event_spans(compute, costs)
        assert timeline.peak_activations == event_peaks(timeline.spans)


def event_spans(schedule: Schedule, costs: Costs) -> list[list[Span]]:
    """Simulate events in order of time: a computation starts when the last of its inputs is available."""
    duration = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    duration["B"] = costs.backward_input + costs.backward_weight
    waiting: dict[str, int] = {}
    followers: dict[str, list[tuple[str, float]]] = {}
    where = {repr(action): rank for rank, actions in enumerate(schedule) for action in actions}
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            needs = [(repr(actions[index - 1]), 0.0)] if index else []
            needs += [
                (need, costs.send if where[need] != rank else 0.0)
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
    """Return the names of required events; some are in no schedule."""
    kind, stage, microbatch = action.op.value, action.stage, action.microbatch
    if kind == "W":
        return [f"{stage}I{microbatch}"]
    if kind == "F":
        return [f"{stage - 1}F{microbatch}"]
    return [f"{stage}F{microbatch}", f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"]


def event_peaks(spans: list[list[Span]]) -> list[int]:
    """Count the activations at every moment, by the clock; an end is counted before a start at the same time."""
    peaks = []
    for rank_spans in spans:
        changes = [(span.start, 1) for span in rank_spans if span.action.op.value == "F"]
        changes += [(span.end, -1) for span in rank_spans if span.action.op.value in "BW"]
        held = [sum(change for _, change in sorted(changes)[: index + 1]) for index in range(len(changes))]
        peaks.append(max(held, default=0))
    return peaks


def test_sends_and_receives_in_the_schedule_change_nothing() -> None:
    costs = Costs(send=0.25)
    for name, p, m, v in cases(4, 5):
        compute = build_schedule(name, p, m, v)
        for ahead in (True, False):
            assert simulate(with_communication(compute, ahead=ahead), costs) == simulate(compute, costs)


def test_evaluation_holds_one_microbatch_and_a_rank_without_work_is_idle() -> None:
    timeline = simulate(forward_only(one_f_one_b(4, 6)), Costs(forward=2))
    assert timeline.peak_activations == [1] * 4
    assert timeline.end == 2 * (6 + 3) and timeline.idle(0) == timeline.idle(3) == 2 * 3
    timeline = simulate([*written("0F0 0B0"), []], Costs())
    assert timeline.peak_activations == timeline.peak_shares == [1, 0]
    assert (timeline.idle(1), timeline.bubble) == (3, 1)
