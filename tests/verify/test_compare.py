"""Tolerances for rounding. No processes: the records are written by hand."""

from dataclasses import replace
from math import inf

import torch

from echelon.verify.compare import Reference, StepComparison, compare_16_bit, compare_float32, first_departure
from echelon.verify.reference import StepRecord

NEAR = 1e-4  # the effect of rounded weights on the weight of this model's reference


def record(shift: float = 0.0) -> StepRecord:
    gradient = torch.tensor([1.0, -2.0])
    return StepRecord(
        loss=1.0, norm=5**0.5, gradients={"w": gradient}, weights={"w": torch.tensor([3.0, 4.0 + shift])}
    )


def compare(*shifts: float, rounded: float) -> list[StepComparison]:
    runs = [[record() if step == 0 else record(rounded) for step in range(len(shifts))]] if rounded else []
    return compare_float32(
        [record(shift) for shift in shifts],
        [record() for _ in shifts],
        learning_rate=1e-3,
        epsilon=1e-5,
        bitwise=False,
        rounded=runs,
    )


def test_a_weight_may_be_off_by_eight_times_the_effect_of_rounding() -> None:
    assert first_departure(compare(0.0, 7.5 * NEAR, rounded=0.0)) is not None
    assert first_departure(compare(0.0, 7.5 * NEAR, rounded=NEAR)) is None
    assert first_departure(compare(0.0, 8.5 * NEAR, rounded=NEAR)) is not None


def test_in_the_first_step_only_gradients_may_be_off_by_twice_the_effect_of_rounding() -> None:
    def departs(step: StepRecord, near: StepRecord, *, bitwise: bool = False) -> bool:
        steps = compare_float32(
            [step], [record()], learning_rate=1e-3, epsilon=1e-5, bitwise=bitwise, rounded=[[near]]
        )
        return first_departure(steps) is not None

    def shifted(by: float) -> StepRecord:
        return replace(record(), gradients={"w": torch.tensor([1.0 + by, -2.0])})

    assert departs(record(NEAR), record(NEAR))  # a weight
    assert departs(replace(record(), loss=1.01), replace(record(), loss=1.01))
    assert departs(shifted(1.5e-4), record()) and not departs(shifted(1.5e-4), shifted(1e-4))
    assert departs(shifted(2.5e-4), shifted(1e-4))
    assert departs(shifted(1e-5), shifted(1e-4), bitwise=True)


def test_loss_gradient_and_norm_may_be_off_by_the_effect_of_rounding_on_each() -> None:
    moved = replace(record(), loss=1.01, norm=5**0.5 + 0.01, gradients={"w": torch.tensor([1.01, -2.0])})
    for quantity in ("loss", "norm", "gradients"):
        step = replace(record(), **{quantity: getattr(moved, quantity)})
        steps = [record(), step]

        def judge(near: StepRecord, steps: list[StepRecord] = steps) -> str | None:
            runs = [[record(), near]]
            expected = [record(), record()]
            return first_departure(
                compare_float32(
                    steps, expected, learning_rate=1e-3, epsilon=1e-5, bitwise=False, rounded=runs
                )
            )

        assert judge(step) is None
        assert judge(record()) is not None


def test_the_loss_of_a_skipped_step_may_be_off_by_the_effect_of_rounding() -> None:
    skipped = replace(record(), norm=inf)
    moved, near = replace(skipped, loss=1.01), replace(skipped, loss=1.005)

    def departs(rounded: StepRecord) -> bool:
        compared = compare_float32(
            [record(), moved],
            [record(), skipped],
            learning_rate=1e-3,
            epsilon=1e-5,
            bitwise=False,
            rounded=[[record(), rounded]],
        )
        return first_departure(compared) is not None

    assert departs(skipped) and not departs(near)


def test_a_tensor_without_entries_agrees() -> None:
    empty = {"w": torch.ones(2), "none": torch.empty(0)}
    step = replace(record(), gradients=empty, weights=empty)
    compared = compare_float32([step], [step], learning_rate=1e-3, epsilon=1e-5, bitwise=False)
    assert first_departure(compared) is None


def test_under_sgd_a_weight_is_off_by_what_its_gradient_is() -> None:
    moved = replace(record(), gradients={"w": torch.tensor([1.0 + 5e-6, -2.0])})

    def departs(by: float) -> bool:
        step = replace(moved, weights={"w": torch.tensor([3.0, 4.0 + by])})
        steps = compare_float32(
            [step],
            [record()],
            learning_rate=0.1,
            epsilon=None,
            bitwise=False,
            rounding={"w": 1e-5},
        )
        return first_departure(steps) is not None

    assert not departs(4e-5) and departs(5e-5)


def in_16_bits(
    *steps: StepRecord, usual: StepRecord, nearby: StepRecord | None, exact: StepRecord | None = None
) -> str | None:
    """Return the departure, if one process is as far from float32 as `usual`, and one nearby as far as `nearby`."""
    near = [] if nearby is None else [[Reference(nearby, record()) for _ in steps]]
    return first_departure(
        compare_16_bit(
            steps,
            [Reference(usual, exact or record()) for _ in steps],
            dtype=torch.bfloat16,
            learning_rate=1e-3,
            nearby=near,
        )
    )


def moved(gradient: float = 0.0, weight: float = 0.0, loss: float = 0.0, norm: float = 0.0) -> StepRecord:
    return replace(
        record(weight),
        loss=1.0 + loss,
        norm=5**0.5 + norm,
        gradients={"w": torch.tensor([1.0 + gradient, -2.0])},
    )


def test_in_16_bits_the_largest_distance_of_the_references_nearby_counts() -> None:
    same = record()
    for far, nearby in (
        (moved(weight=0.14), moved(weight=0.1)),
        (moved(gradient=0.14), moved(gradient=0.1)),
        (moved(loss=0.14), moved(loss=0.1)),
        (moved(norm=0.14), moved(norm=0.1)),
    ):
        assert in_16_bits(same, far, usual=same, nearby=None) is not None
        assert in_16_bits(same, far, usual=same, nearby=nearby) is None
    assert in_16_bits(same, moved(weight=0.21), usual=same, nearby=moved(weight=0.1)) is not None


def test_in_16_bits_references_nearby_excuse_only_the_weights_of_the_first_step() -> None:
    near = moved(gradient=0.1, weight=0.1, loss=0.1, norm=0.1)
    assert in_16_bits(moved(weight=0.14), usual=record(), nearby=near) is None
    for far in (moved(gradient=0.14), moved(loss=0.14), moved(norm=0.14)):
        assert in_16_bits(far, usual=record(), nearby=near) is not None


def test_a_reference_nearby_with_another_number_of_skipped_steps_does_not_count() -> None:
    near = replace(moved(weight=0.1), skipped=1)
    assert in_16_bits(record(), moved(weight=0.14), usual=record(), nearby=near) is not None


def test_an_expert_that_one_format_gives_no_token_may_have_no_gradient() -> None:
    def having(expert: float) -> StepRecord:
        return replace(record(), gradients={**record().gradients, "expert": torch.tensor([expert])})

    for step in (record(), having(0.1)):
        assert in_16_bits(step, usual=record(), nearby=None, exact=having(0.1)) is None
    departed = in_16_bits(having(0.1), usual=record(), nearby=None)
    assert departed is not None and "gradient of expert is off by inf" in departed
    departed = in_16_bits(having(2.0), usual=record(), nearby=None, exact=having(0.1))
    assert departed is not None and "gradient of expert" in departed
