"""Comparison of a layout's steps with the reference: tolerances, and the first quantity outside of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .reference import StepRecord

# Factor by which a distance to float32 may exceed that of the reference in the same 16-bit precision. The reference
# rounds the gradients of a global batch, a run those of every microbatch.
ALLOWED_16_BIT = 2.0
# A gradient smaller than this fraction of the largest is zero up to rounding. So is one smaller than the rounding of a
# sum of numbers of the size of the loss, such as the gradient of a bias that all choices share.
ZERO_GRADIENT = 1e-6
ZERO_SUM = 2**-23
# Factor by which a distance in float32 may exceed those of references with rounded weights, after the first step.
ALLOWED_ROUNDING = 8.0
# The same for gradients of the first step: run and reference may both have the full rounding error.
ALLOWED_ROUNDING_AT_FIRST = 2.0
# Factor by which one tensor's distance may exceed the reference's. Seen: up to 4.5, where noise changes its sign.
STRAY = 10.0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity, compared with its reference.

    Args:
        quantity: "loss", "gradient", "norm", "weight", "copy", "loss scale" or "number of skipped steps".
        name: the worst tensor; empty for a scalar.
        distance: the distance to the reference (in 16 bits: to float32).
        allowed: the largest distance that agrees.
    """

    quantity: str
    name: str
    distance: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """True if the distance is allowed; False for NaN."""
        return self.distance <= self.allowed

    def __str__(self) -> str:
        subject = f"{self.quantity} of {self.name}" if self.name else self.quantity
        return f"{subject} is off by {self.distance:.3g}, allowed {self.allowed:.3g}"


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """One step of the layout, compared with the reference's."""

    step: int
    loss: float
    reference_loss: float
    measures: tuple[Measure, ...]

    def measure(self, quantity: str) -> Measure:
        """Return the measure of a quantity: that of its worst tensor."""
        return next(measure for measure in self.measures if measure.quantity == quantity)


def compare_float32(
    actual: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    *,
    learning_rate: float,
    epsilon: float | None,
    bitwise: bool,
    rounding: Mapping[str, float] | None = None,
    rounded: Iterable[Sequence[StepRecord]] = (),
) -> list[StepComparison]:
    """Compare float32 runs tensor by tensor.

    Loss: 1e-6 (relative to max(1, loss)). Gradients: 1e-5 × max(largest entry of the tensor, 1e-3 × largest of
    all). A tensor whose entries are all below 1e-6 × largest of all may differ by that: such a gradient is
    mathematically zero (a key's bias in BERT, the bias of its span head), and its values are noise of a sum. So may one
    whose entries are all below 2**-23 times the loss.
    Weights: 1e-5 × largest entry + 1e-3 × learning rate, since AdamW divides gradients by their own size. To
    this add the effect of gradient distances, which were compared themselves: distance / epsilon × learning rate for an
    entry near epsilon. At most 1e-1 × learning rate, as for divided noise.

    Args:
        actual, expected: the steps of the layout, and of the reference.
        learning_rate: the largest of the run.
        epsilon: AdamW's; None for SGD, which divides by nothing.
        bitwise: loss and gradients of the first step must be equal (a pipeline alone, nothing tied). Weights, and
            so later steps, may differ: an update in another memory layout may round differently.
        rounding: by name, the fraction of the learning rate by which a weight may differ though gradients agree, if it
            is not 1e-3.
        rounded: runs of the reference from weights that were moved by a unit in the last place, with another scale of
            the loss. A float32 computation gives at best the exact result for weights this near. From the second step
            on, where AdamW has divided by gradients, a quantity may be off by 8 times the distance between these runs
            and the reference; a gradient of the first step by twice that distance. Of a run only its distances are
            kept.
    """
    effects = [[_distances(*pair) for pair in zip(run, expected, strict=True)] for run in rounded]
    compared: list[StepComparison] = []
    shares = dict(rounding or {})
    for index, (step, reference) in enumerate(zip(actual, expected, strict=True)):
        is_skipped = not isfinite(reference.norm)
        if not is_skipped:
            _add_update_errors(shares, step, reference, epsilon=epsilon)
        allowed = _allowed(
            reference,
            [run_effects[index] for run_effects in effects],
            is_first=index == 0,
            bitwise=bitwise,
            weight_errors={name: learning_rate * shares.get(name, 1e-3) for name in reference.weights},
        )
        loss = _scalar("loss", step.loss, reference.loss, allowed.loss)
        if is_skipped:
            compared.append(_compare_skipped(loss, actual, reference, index))
            continue
        measures = (
            loss,
            _worst("gradient", step.gradients, reference.gradients, allowed.gradients),
            _scalar("norm", step.norm, reference.norm, allowed.norm),
            _worst("weight", step.weights, reference.weights, allowed.weights),
        )
        compared.append(_comparison(measures, step, reference, index))
    return compared


class _Allowed(NamedTuple):
    """Allowed distances of a float32 step; of gradients and weights by name."""

    loss: float
    norm: float
    gradients: dict[str, float]
    weights: dict[str, float]


def _allowed(
    reference: StepRecord,
    effects: Sequence["_Distances"],
    *,
    is_first: bool,
    bitwise: bool,
    weight_errors: Mapping[str, float],
) -> _Allowed:
    """Return the allowed distances from a step of the reference, as `compare_float32` lists them.

    Args:
        reference: the step.
        effects: distances of this step between the reference and its rounded runs.
        is_first: True for the first step.
        bitwise: see `compare_float32`.
        weight_errors: by name, the error that updates may have added to a weight so far.
    """
    exact = bitwise and is_first
    loss, norm = 0.0 if exact else 1e-6 * max(1.0, abs(reference.loss)), 1e-5 * reference.norm
    gradients = _allowed_gradients(reference, exact=exact)
    weights = {name: 1e-5 * _peak(weight) + weight_errors[name] for name, weight in reference.weights.items()}
    for effect in () if exact else effects:
        if is_first:
            _widen(gradients, effect.gradients, ALLOWED_ROUNDING_AT_FIRST)
            continue
        loss = max(loss, ALLOWED_ROUNDING * effect.loss)
        norm = max(norm, ALLOWED_ROUNDING * effect.norm)
        _widen(gradients, effect.gradients, ALLOWED_ROUNDING)
        _widen(weights, effect.weights, ALLOWED_ROUNDING)
    return _Allowed(loss, norm, gradients, weights)


def _allowed_gradients(reference: StepRecord, *, exact: bool) -> dict[str, float]:
    """Return the allowed distance of each gradient in float32, see `compare_float32`; 0 if they must be exact."""
    peaks, noise = _peaks_and_noise(reference)
    if exact:
        return dict.fromkeys(peaks, 0.0)
    least = 1e-3 * max(peaks.values())
    return {name: noise if peak < noise else 1e-5 * max(peak, least) for name, peak in peaks.items()}


def _add_update_errors(
    shares: dict[str, float], step: StepRecord, reference: StepRecord, *, epsilon: float | None
) -> None:
    """Add to the allowed errors of weights what an update makes of this step's gradient distances.

    Args:
        shares: by name, the fraction of the learning rate by which a weight may be off; changed in place.
        epsilon: see `compare_float32`.
    """
    peaks, noise = _peaks_and_noise(reference)
    for name, peak in peaks.items():
        distance = _distance(step.gradients.get(name), reference.gradients[name])
        if epsilon is None:
            added, most = distance, inf
        else:
            added, most = 1e-1 if peak < noise else distance / epsilon, 1e-1
        shares[name] = min(shares.get(name, 1e-3) + added, most)


def _peaks_and_noise(reference: StepRecord) -> tuple[dict[str, float], float]:
    """Return the largest entry of each gradient, and the size below which a gradient is the noise of a sum."""
    peaks = {name: _peak(gradient) for name, gradient in reference.gradients.items()}
    return peaks, max(ZERO_GRADIENT * max(peaks.values()), ZERO_SUM * abs(reference.loss))


class Reference(NamedTuple):
    """A step of one process in 16 bits, and a step in float32 from the same weights."""

    rounded: StepRecord
    exact: StepRecord


def compare_16_bit(
    actual: Sequence[StepRecord],
    expected: Sequence[Reference],
    *,
    dtype: torch.dtype,
    learning_rate: float,
    nearby: Sequence[Sequence[Reference]] = (),
) -> list[StepComparison]:
    """Compare distances to a float32 run: the layout's may be twice the reference's in the same precision.

    A distance is the norm of a difference, over all tensors together. For a single small tensor, rounding makes the
    distance random, and where AdamW divides a gradient by its own size, the sign of noise does. A single tensor may be
    off by `STRAY` times its reference's distance, so a wrong one is still found. The reference's distance may be tiny
    by chance. So three distances are always allowed: that of rounding, that of one entry which AdamW moves in the other
    direction, and the largest of the reference in earlier steps.

    Args:
        nearby: references from weights that differ only by rounding. In the reference or in these, an entry near zero
            may move in the other direction, or a token near a tie may be routed to another expert. After the first
            update the largest distance of all of them counts. Loss, gradients and norm of the first step are compared
            with the reference only.
    """
    rounding = torch.finfo(dtype).eps
    compared = []
    gradient_floor, weight_floor = 0.0, 2 * learning_rate
    for index, (step, reference) in enumerate(zip(actual, expected, strict=True)):
        references = [
            reference,
            *(run[index] for run in nearby if run[index].rounded.skipped == reference.rounded.skipped),
        ]
        step, references = _with_idle_experts(step, references)
        rounded, exact = references[0]
        # The quantities before the first update are compared with the reference only.
        before_update = references if index else references[:1]
        loss = _near("loss", step, before_update, rounding * abs(exact.loss))
        if not isfinite(exact.norm):
            compared.append(_compare_skipped(loss, actual, rounded, index))
            continue
        floor = max(rounding * exact.norm, gradient_floor)
        gradient = _near_together("gradient", step, before_update, floor)
        weight = _near_together("weight", step, references, weight_floor)
        gradient_floor = max(gradient_floor, _total_distance(rounded.gradients, exact.gradients))
        weight_floor = max(weight_floor, _total_distance(rounded.weights, exact.weights))
        norm = _near("norm", step, before_update, rounding * exact.norm)
        measures = (loss, gradient, norm, weight)
        compared.append(_comparison(measures, step, rounded, index))
    return compared


def _with_idle_experts(
    step: StepRecord, references: Sequence[Reference]
) -> tuple[StepRecord, list[Reference]]:
    """Add gradients of zeros where some references lack one: of an expert whose only token is near a tie."""
    records = [record for reference in references for record in reference]
    all_gradients = {name: gradient for record in records for name, gradient in record.gradients.items()}
    idle = {
        name: torch.zeros_like(gradient)
        for name, gradient in all_gradients.items()
        if any(name not in record.gradients for record in records)
    }

    def added(record: StepRecord) -> StepRecord:
        return replace(record, gradients={**idle, **record.gradients}) if idle else record

    return added(step), [Reference(*map(added, reference)) for reference in references]


def first_departure(comparisons: Sequence[StepComparison]) -> str | None:
    """Describe the first quantity that departs from the reference; None if all agree."""
    for comparison in comparisons:
        for measure in comparison.measures:
            if not measure.agrees:
                return f"step {comparison.step}: {measure}"
    return None


def _comparison(
    measures: tuple[Measure, ...], record: StepRecord, reference: StepRecord, index: int
) -> StepComparison:
    """Return a step's measures, and those of quantities that must be equal."""
    unequal = record.unequal_copies
    equal = (
        Measure(quantity="copy", name=unequal[0] if unequal else "", distance=len(unequal), allowed=0.0),
        _scalar("loss scale", record.loss_scale, reference.loss_scale, 0.0),
        _scalar("number of skipped steps", record.skipped, reference.skipped, 0.0),
    )
    return StepComparison(
        step=index + 1, loss=record.loss, reference_loss=reference.loss, measures=(*measures, *equal)
    )


def _compare_skipped(
    loss: Measure, actual: Sequence[StepRecord], reference: StepRecord, index: int
) -> StepComparison:
    """Compare a skipped step: the same parameters have gradients, the norm is not finite, and no weight changes."""
    step = actual[index]
    before = actual[index - 1].weights if index else reference.weights
    gradient = _mismatch("gradient", step.gradients, reference.gradients)
    measures = (
        loss,
        gradient or Measure(quantity="gradient", name="", distance=0.0, allowed=0.0),
        Measure(quantity="norm", name="", distance=0.0 if step.norm == inf else inf, allowed=0.0),
        _worst("weight", step.weights, before, dict.fromkeys(before, 0.0)),
    )
    return _comparison(measures, step, reference, index)


def _near(
    quantity: Literal["loss", "norm"], actual: StepRecord, references: Sequence[Reference], floor: float
) -> Measure:
    """Compare a scalar's distance to float32 with those of the references; float32 is that of the first one."""
    usual = max(
        abs(getattr(reference.rounded, quantity) - getattr(reference.exact, quantity))
        for reference in references
    )
    return Measure(
        quantity=quantity,
        name="",
        distance=abs(getattr(actual, quantity) - getattr(references[0].exact, quantity)),
        allowed=ALLOWED_16_BIT * max(usual, floor),
    )


def _near_together(
    quantity: Literal["gradient", "weight"],
    actual: StepRecord,
    references: Sequence[Reference],
    floor: float,
) -> Measure:
    """Compare the distance to float32 over all tensors, named by the one that adds most; a stray tensor goes first."""
    tensors, exact = _tensors(quantity, actual), _tensors(quantity, references[0].exact)
    if (mismatch := _mismatch(quantity, tensors, exact)) is not None:
        return mismatch
    pairs = [
        (_tensors(quantity, reference.rounded), _tensors(quantity, reference.exact))
        for reference in references
    ]
    distances = {name: (tensors[name].float() - tensor).norm().item() for name, tensor in exact.items()}
    usual = {
        name: max((rounded[name] - float32[name]).norm().item() for rounded, float32 in pairs)
        for name in exact
    }
    usual_together = max(floor, *(_total_distance(rounded, float32) for rounded, float32 in pairs))
    share = usual_together / len(usual) ** 0.5  # of one tensor, if all have equal distances
    for name, distance in distances.items():
        allowed = STRAY * max(usual[name], share)
        if not distance <= allowed:  # also for NaN
            return Measure(quantity=quantity, name=name, distance=distance, allowed=allowed)
    worst = max(distances, key=lambda name: distances[name])
    together = hypot(*distances.values())
    return Measure(quantity=quantity, name=worst, distance=together, allowed=ALLOWED_16_BIT * usual_together)


def _tensors(quantity: Literal["gradient", "weight"], record: StepRecord) -> Mapping[str, Tensor]:
    return record.gradients if quantity == "gradient" else record.weights


def _total_distance(reference: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference, over all tensors together."""
    return hypot(*((reference[name] - tensor).norm().item() for name, tensor in exact.items()))


def _distance(actual: Tensor | None, expected: Tensor) -> float:
    """Return the largest difference of two entries; 0 if a tensor is missing, which is reported as a mismatch."""
    if actual is None or actual.shape != expected.shape:
        return 0.0
    return _peak(actual.float() - expected)


def _peak(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 of one without entries."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _mismatch(quantity: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Measure | None:
    """Return the first tensor that is missing, extra or of another shape, as a measure that departs."""
    for name in (*expected, *actual):
        if name not in actual or name not in expected or actual[name].shape != expected[name].shape:
            return Measure(quantity=quantity, name=name, distance=float("inf"), allowed=0.0)
    return None


class _Distances(NamedTuple):
    """The distances between two records of a step; of tensors the largest difference of two entries, by name."""

    loss: float
    norm: float
    gradients: dict[str, float]
    weights: dict[str, float]


def _distances(rounded: StepRecord, expected: StepRecord) -> _Distances:
    """Return the distances of a reference with moved weights from the reference itself, which has the same tensors."""
    gradients, weights = (
        {name: _distance(moved[name], tensor) for name, tensor in tensors.items()}
        for moved, tensors in (
            (rounded.gradients, expected.gradients),
            (rounded.weights, expected.weights),
        )
    )
    return _Distances(
        abs(rounded.loss - expected.loss), abs(rounded.norm - expected.norm), gradients, weights
    )


def _widen(allowed: dict[str, float], distances: Mapping[str, float], factor: float) -> None:
    """Raise each tensor's allowed distance to this factor of the distance that rounded weights cause."""
    for name, distance in distances.items():
        allowed[name] = max(allowed[name], factor * distance)


def _scalar(quantity: str, actual: float, expected: float, allowed: float) -> Measure:
    return Measure(quantity=quantity, name="", distance=abs(actual - expected), allowed=allowed)


def _worst(
    quantity: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: Mapping[str, float]
) -> Measure:
    """Return the first tensor that departs, or else the one nearest to its limit."""
    if (mismatch := _mismatch(quantity, actual, expected)) is not None:
        return mismatch
    measures = []
    for name, tensor in expected.items():
        distance = _distance(actual[name], tensor)
        measures.append(Measure(quantity=quantity, name=name, distance=distance, allowed=allowed[name]))
    departed = [measure for measure in measures if not measure.agrees]
    if departed:
        return departed[0]
    return max(measures, key=lambda measure: measure.distance / measure.allowed if measure.allowed else 0.0)
