"""The simulation against the published results, over all small sizes."""

from itertools import product

import pytest

from echelon.pipeline.action import Action, Op
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import SCHEDULES, forward_only, gpipe, one_f_one_b
from echelon.pipeline.simulate import Costs, Span, simulate

SIZES = list(product(range(1, 7), range(1, 13)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [Costs(forward=1, backward=1), Costs(), Costs(forward=3, backward=4)])
def test_the_bubble_is_stages_less_one_over_microbatches(name: str, costs: Costs) -> None:
    for num_ranks, num_microbatches in SIZES:
        timeline = simulate(SCHEDULES[name](num_ranks, num_microbatches), costs)
        assert timeline.bubble == pytest.approx((num_ranks - 1) / num_microbatches, abs=1e-12)


def test_gpipe_holds_the_activations_of_all_microbatches() -> None:
    for num_ranks, num_microbatches in SIZES:
        peak = simulate(gpipe(num_ranks, num_microbatches), Costs()).peak_activations
        assert peak == [num_microbatches] * num_ranks


def test_one_f_one_b_holds_the_activations_of_the_stages_left() -> None:
    for num_ranks, num_microbatches in SIZES:
        peak = simulate(one_f_one_b(num_ranks, num_microbatches), Costs()).peak_activations
        assert peak == [min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_and_receives_in_the_schedule_change_nothing(name: str) -> None:
    compute = SCHEDULES[name](3, 5)
    costs = Costs(send=0.25)
    assert simulate(with_communication(compute, 3), costs) == simulate(compute, costs)


def test_evaluation_holds_one_microbatch_and_fills_once() -> None:
    timeline = simulate(forward_only(one_f_one_b(4, 6)), Costs(forward=2))
    assert timeline.peak_activations == [1] * 4
    assert timeline.end == 2 * (6 + 3)
    assert timeline.idle(0) == timeline.idle(3) == 2 * 3


def test_spans_stand_where_a_hand_drawn_timeline_has_them() -> None:
    timeline = simulate(one_f_one_b(2, 2), Costs(forward=1, backward=2, send=0.5))
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


def test_a_schedule_that_cannot_go_on_is_refused() -> None:
    schedule = gpipe(2, 1)
    schedule[1].reverse()
    with pytest.raises(ValueError, match="deadlocks: 0B0, 1B0 can never start"):
        simulate(schedule, Costs())


@pytest.mark.parametrize("wrong", [{"forward": 0}, {"backward": -1}, {"send": -0.1}])
def test_costs_that_are_no_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Costs(**wrong)
