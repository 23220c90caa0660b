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
    found: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    *,
    learning_rate: float,
    epsilon: float,
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
        epsilon: AdamW's.
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
    effects = [[_distances(*both) for both in zip(run, expected, strict=True)] for run in rounded]
    compared: list[StepComparison] = []
    shares = dict(rounding or {})
    for index, (own, other) in enumerate(zip(found, expected, strict=True)):
        exact = bitwise and index == 0
        loss = _scalar("loss", own.loss, other.loss, 0.0 if exact else 1e-6 * max(1.0, abs(other.loss)))
        if not isfinite(other.norm):
            compared.append(_compare_skipped(loss, found, other, index))
            continue
        gradient_allowed = _allowed_gradients(own, other, shares, epsilon=epsilon, exact=exact)
        weight_allowed = {
            name: 1e-5 * weight.abs().max().item() + learning_rate * shares.get(name, 1e-3)
            for name, weight in other.weights.items()
        }
        norm_allowed = 1e-5 * other.norm
        for effect in () if exact else (each[index] for each in effects):
            if index == 0:
                _widen(gradient_allowed, effect.gradients, ALLOWED_ROUNDING_AT_FIRST)
                continue
            loss = _scalar("loss", own.loss, other.loss, max(loss.allowed, ALLOWED_ROUNDING * effect.loss))
            norm_allowed = max(norm_allowed, ALLOWED_ROUNDING * effect.norm)
            _widen(gradient_allowed, effect.gradients, ALLOWED_ROUNDING)
            _widen(weight_allowed, effect.weights, ALLOWED_ROUNDING)
        measures = (
            loss,
            _worst("gradient", own.gradients, other.gradients, gradient_allowed),
            _scalar("norm", own.norm, other.norm, norm_allowed),
            _worst("weight", own.weights, other.weights, weight_allowed),
        )
        compared.append(_comparison(measures, own, other, index))
    return compared


def _allowed_gradients(
    own: StepRecord, other: StepRecord, shares: dict[str, float], *, epsilon: float, exact: bool
) -> dict[str, float]:
    """Return the allowed distance of each gradient in float32.

    Args:
        shares: by name, the fraction of the learning rate by which a weight may be off; this step's is added.
    """
    peaks = {name: gradient.abs().max().item() for name, gradient in other.gradients.items()}
    largest = max(peaks.values())
    noise = max(ZERO_GRADIENT * largest, ZERO_SUM * abs(other.loss))
    for name, peak in peaks.items():
        distance = _distance(own.gradients.get(name), other.gradients[name])
        moved = 1e-1 if peak < noise else distance / epsilon
        shares[name] = min(shares.get(name, 1e-3) + moved, 1e-1)
    return {
        name: 0.0 if exact else noise if peak < noise else 1e-5 * max(peak, 1e-3 * largest)
        for name, peak in peaks.items()
    }


class Reference(NamedTuple):
    """A step of one process in 16 bits, and a step in float32 from the same weights."""

    rounded: StepRecord
    exact: StepRecord


def compare_16_bit(
    found: Sequence[StepRecord],
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
    for index, (own, reference) in enumerate(zip(found, expected, strict=True)):
        same = [
            reference,
            *(run[index] for run in nearby if run[index].rounded.skipped == reference.rounded.skipped),
        ]
        own, same = _with_idle_experts(own, same)
        other, exact = same[0]
        before = same if index else same[:1]
        loss = _near("loss", own, before, rounding * abs(exact.loss))
        if not isfinite(exact.norm):
            compared.append(_compare_skipped(loss, found, other, index))
            continue
        gradient = _near_together("gradient", own, before, max(rounding * exact.norm, gradient_floor))
        weight = _near_together("weight", own, same, weight_floor)
        gradient_floor = max(gradient_floor, _apart(other.gradients, exact.gradients))
        weight_floor = max(weight_floor, _apart(other.weights, exact.weights))
        norm = _near("norm", own, before, rounding * exact.norm)
        measures = (loss, gradient, norm, weight)
        compared.append(_comparison(measures, own, other, index))
    return compared


def _with_idle_experts(
    own: StepRecord, references: Sequence[Reference]
) -> tuple[StepRecord, list[Reference]]:
    """Add gradients of zeros where some references lack one: of an expert whose only token is near a tie."""
    records = [record for each in references for record in each]
    every = {name: gradient for record in records for name, gradient in record.gradients.items()}
    idle = {
        name: torch.zeros_like(gradient)
        for name, gradient in every.items()
        if any(name not in record.gradients for record in records)
    }

    def added(record: StepRecord) -> StepRecord:
        return replace(record, gradients={**idle, **record.gradients}) if idle else record

    return added(own), [Reference(*map(added, each)) for each in references]


def first_departure(comparisons: Sequence[StepComparison]) -> str | None:
    """Describe the first quantity that departs from the reference; None if all agree."""
    for comparison in comparisons:
        for measure in comparison.measures:
            if not measure.agrees:
                return f"step {comparison.step}: {measure}"
    return None


def _comparison(
    measures: tuple[Measure, ...], own: StepRecord, other: StepRecord, index: int
) -> StepComparison:
    """Return a step's measures, and those of quantities that must be equal."""
    unequal = own.unequal_copies
    equal = (
        Measure(quantity="copy", name=unequal[0] if unequal else "", distance=len(unequal), allowed=0.0),
        _scalar("loss scale", own.loss_scale, other.loss_scale, 0.0),
        _scalar("number of skipped steps", own.skipped, other.skipped, 0.0),
    )
    return StepComparison(
        step=index + 1, loss=own.loss, reference_loss=other.loss, measures=(*measures, *equal)
    )


def _compare_skipped(
    loss: Measure, found: Sequence[StepRecord], other: StepRecord, index: int
) -> StepComparison:
    """Compare a skipped step: the same parameters have gradients, the norm is not finite, and no weight changes."""
    own = found[index]
    before = found[index - 1].weights if index else other.weights
    gradient = _mismatch("gradient", own.gradients, other.gradients)
    measures = (
        loss,
        gradient or Measure(quantity="gradient", name="", distance=0.0, allowed=0.0),
        Measure(quantity="norm", name="", distance=0.0 if own.norm == inf else inf, allowed=0.0),
        _worst("weight", own.weights, before, dict.fromkeys(before, 0.0)),
    )
    return _comparison(measures, own, other, index)


def _near(
    quantity: Literal["loss", "norm"], found: StepRecord, references: Sequence[Reference], floor: float
) -> Measure:
    """Compare a scalar's distance to float32 with those of the references; float32 is that of the first one."""
    usual = max(abs(getattr(each.rounded, quantity) - getattr(each.exact, quantity)) for each in references)
    return Measure(
        quantity=quantity,
        name="",
        distance=abs(getattr(found, quantity) - getattr(references[0].exact, quantity)),
        allowed=ALLOWED_16_BIT * max(usual, floor),
    )


def _near_together(
    quantity: Literal["gradient", "weight"],
    found: StepRecord,
    references: Sequence[Reference],
    floor: float,
) -> Measure:
    """Compare the distance to float32 over all tensors, named by the one that adds most; a stray tensor goes first."""
    own, exact = _tensors(quantity, found), _tensors(quantity, references[0].exact)
    if (mismatch := _mismatch(quantity, own, exact)) is not None:
        return mismatch
    pairs = [(_tensors(quantity, each.rounded), _tensors(quantity, each.exact)) for each in references]
    distances = {name: (own[name].float() - tensor).norm().item() for name, tensor in exact.items()}
    usual = {name: max((one[name] - other[name]).norm().item() for one, other in pairs) for name in exact}
    usual_together = max(floor, *(_apart(one, other) for one, other in pairs))
    share = usual_together / len(usual) ** 0.5
    for name, distance in distances.items():
        allowed = STRAY * max(usual[name], share)
        if not distance <= allowed:
            return Measure(quantity=quantity, name=name, distance=distance, allowed=allowed)
    worst = max(distances, key=lambda name: distances[name])
    together = hypot(*distances.values())
    return Measure(quantity=quantity, name=worst, distance=together, allowed=ALLOWED_16_BIT * usual_together)


def _tensors(quantity: Literal["gradient", "weight"], record: StepRecord) -> Mapping[str, Tensor]:
    return record.gradients if quantity == "gradient" else record.weights


def _apart(reference: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference, over all tensors together."""
    return hypot(*((reference[name] - tensor).norm().item() for name, tensor in exact.items()))


def _distance(found: Tensor | None, expected: Tensor) -> float:
    """Return the largest difference of two entries; 0 if a tensor is missing, which is reported as a mismatch."""
    if found is None or found.shape != expected.shape:
        return 0.0
    return (found.float() - expected).abs().max().item()


def _mismatch(quantity: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Measure | None:
    """Return the first tensor that is missing, extra or of another shape, as a measure that departs."""
    for name in (*expected, *found):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            return Measure(quantity=quantity, name=name, distance=float("inf"), allowed=0.0)
    return None


class _Distances(NamedTuple):
    """The distances between two records of a step; of tensors the largest difference of two entries, by name."""

    loss: float
    norm: float
    gradients: dict[str, float]
    weights: dict[str, float]


def _distances(rounded: StepRecord, expected: StepRecord) -> _Distances:
    gradients, weights = (
        {name: _distance(near[name], tensor) for name, tensor in tensors.items()}
        for near, tensors in (
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


def _scalar(quantity: str, found: float, expected: float, allowed: float) -> Measure:
    return Measure(quantity=quantity, name="", distance=abs(found - expected), allowed=allowed)


def _worst(
    quantity: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: Mapping[str, float]
) -> Measure:
    """Return the first tensor that departs, or else the one nearest to its limit."""
    if (mismatch := _mismatch(quantity, found, expected)) is not None:
        return mismatch
    measures = []
    for name, tensor in expected.items():
        distance = _distance(found[name], tensor)
        measures.append(Measure(quantity=quantity, name=name, distance=distance, allowed=allowed[name]))
    departed = [measure for measure in measures if not measure.agrees]
    if departed:
        return departed[0]
    return max(measures, key=lambda measure: measure.distance / measure.allowed if measure.allowed else 0.0)
