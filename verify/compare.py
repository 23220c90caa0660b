"""Comparison of a layout's steps with the reference's: tolerances, and the first quantity that departs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .reference import StepRecord

# Distances to float32 may exceed a reference's own, in the same 16-bit precision, by this much.
ALLOWED_16_BIT = 1.5
# A gradient smaller than this share of the largest is zero up to rounding.
ZERO_GRADIENT = 1e-6
# Distances in float32 may exceed those of references whose weights were rounded by this much, after the first step.
ALLOWED_ROUNDING = 4.0
# Gradients of the first step by this much: the run and the reference are both off by as much as rounding makes of them.
ALLOWED_ROUNDING_AT_FIRST = 2.0
# One tensor's distance may exceed the reference's by this much. Seen: up to 4.5, where signs of noise flip.
STRAY = 8.0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity beside its reference.

    Args:
        quantity: "loss", "gradient", "norm", "weight", "copy", "loss scale" or "number of skipped steps".
        name: the worst tensor; empty for a scalar.
        distance: from the reference (in 16 bits: from float32).
        allowed: the largest distance that agrees.
    """

    quantity: str
    name: str
    distance: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """True if it is as near as it has to be; not a number is not."""
        return self.distance <= self.allowed

    def __str__(self) -> str:
        subject = f"{self.quantity} of {self.name}" if self.name else self.quantity
        return f"{subject} is off by {self.distance:.3g}, allowed {self.allowed:.3g}"


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """One step of the layout beside the reference's."""

    step: int
    loss: float
    reference_loss: float
    measures: tuple[Measure, ...]

    def measure(self, quantity: str) -> Measure:
        """The measure of a quantity: that of its worst tensor."""
        return next(measure for measure in self.measures if measure.quantity == quantity)


def compare_float32(
    found: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    *,
    learning_rate: float,
    epsilon: float,
    bitwise: bool,
    rounded: Sequence[Sequence[StepRecord]] = (),
) -> list[StepComparison]:
    """Compare float32 runs tensor by tensor.

    Loss 1e-6 (relative to max(1, loss)). Gradients 1e-5 × max(largest entry of the tensor, 1e-3 × largest of
    all); where all entries are below 1e-6 × largest of all, that: such a gradient is mathematically zero (a key's
    bias in BERT, the bias of its span head) and what is left is the noise of its sum. Weights 1e-5 × largest
    entry + 1e-3 × learning rate, since AdamW divides gradients by their own size; besides what it makes of the
    distances of the gradients so far, which were compared themselves: distance / epsilon × learning rate for an entry
    that is itself near epsilon. At most 1e-1 × learning rate, as where it divided noise.

    Args:
        epsilon: AdamW's.
        bitwise: the first step's loss and gradients must be equal (a pipeline alone, nothing tied). Later
            steps follow from weights that an update in another memory layout may round differently.
        rounded: runs of the reference from weights that were moved by a unit in the last place. What a computation in
            float32 gives is at best the exact result for weights that are so near; so from the second step on, where
            AdamW has divided by gradients, a quantity may be off by 4 times what lies between these runs and the
            reference, and a gradient of the first step by twice that.
    """
    compared: list[StepComparison] = []
    shares: dict[str, float] = {}
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
        for run in () if exact else rounded:
            near = run[index]
            if index == 0:
                _widen(gradient_allowed, near.gradients, other.gradients, ALLOWED_ROUNDING_AT_FIRST)
                continue
            loss = _scalar("loss", own.loss, other.loss, max(loss.allowed, _reach(near.loss, other.loss)))
            norm_allowed = max(norm_allowed, _reach(near.norm, other.norm))
            _widen(gradient_allowed, near.gradients, other.gradients, ALLOWED_ROUNDING)
            _widen(weight_allowed, near.weights, other.weights, ALLOWED_ROUNDING)
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
    """The allowed distance of each gradient in float32.

    Args:
        shares: by name, the share of the learning rate by which a weight may be off; grows by this step's.
    """
    peaks = {name: gradient.abs().max().item() for name, gradient in other.gradients.items()}
    largest = max(peaks.values())
    noise = ZERO_GRADIENT * largest
    for name, peak in peaks.items():
        distance = _distance(own.gradients.get(name), other.gradients[name])
        moved = 1e-1 if peak < noise else distance / epsilon
        shares[name] = min(shares.get(name, 1e-3) + moved, 1e-1)
    return {
        name: 0.0 if exact else noise if peak < noise else 1e-5 * max(peak, 1e-3 * largest)
        for name, peak in peaks.items()
    }


class Reference(NamedTuple):
    """A step of one process in 16 bits, and of one in float32 that began with the same weights."""

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
    """Compare distances to the float32 run: the layout's may be 1.5 times the reference's in the same precision.

    A distance is the norm of a difference, over all tensors together: rounding decides the distance of a single
    small tensor by chance, and where AdamW divides a gradient by its own size the sign of noise. A single
    tensor may be off by `STRAY` times its reference's distance, so one that is wrong still shows. A distance
    that happens to be tiny for the reference says nothing: nothing has to be nearer than the rounding, than one
    entry that AdamW moves the other way, nor than the reference itself was in a step before.

    Args:
        nearby: references of weights so near that they differ by what they are rounded to. Where one entry near zero
            is moved the other way, or a token near a tie goes to another expert, the reference has that luck or a
            neighbour has it; so the farthest of all of them counts, once weights have been stepped. The loss, the
            gradients and the norm of the first step are compared with the reference alone.
    """
    rounding = torch.finfo(dtype).eps
    compared = []
    gradient_floor, weight_floor = 0.0, 2 * learning_rate
    for index, (own, reference) in enumerate(zip(found, expected, strict=True)):
        other, exact = reference
        same = [reference, *(run[index] for run in nearby if run[index].rounded.skipped == other.skipped)]
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


def first_departure(comparisons: Sequence[StepComparison]) -> str | None:
    """The first quantity that departs from the reference, in words, or None."""
    for comparison in comparisons:
        for measure in comparison.measures:
            if not measure.agrees:
                return f"step {comparison.step}: {measure}"
    return None


def _comparison(
    measures: tuple[Measure, ...], own: StepRecord, other: StepRecord, index: int
) -> StepComparison:
    """A step's measures, and those of what has to be equal."""
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
    """A step whose gradients are not finite: the same have some, their norm is not finite, no weight moves."""
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
    """A figure's distance to float32, beside what those of the references allow; the first one's float32 counts."""
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
    """All tensors' distance to float32 together, under the name of the one that adds most; a stray one first."""
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
    """The norm of the difference of all tensors together."""
    return hypot(*((reference[name] - tensor).norm().item() for name, tensor in exact.items()))


def _distance(found: Tensor | None, expected: Tensor) -> float:
    """The largest difference of two entries; 0 where there is nothing to compare, which is reported as a mismatch."""
    if found is None or found.shape != expected.shape:
        return 0.0
    return (found.float() - expected).abs().max().item()


def _mismatch(quantity: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Measure | None:
    """The first tensor that is missing, extra or of another shape, as a measure that departs."""
    for name in (*expected, *found):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            return Measure(quantity=quantity, name=name, distance=float("inf"), allowed=0.0)
    return None


def _reach(rounded: float, expected: float) -> float:
    """The distance that rounded weights allow a number."""
    return ALLOWED_ROUNDING * abs(rounded - expected)


def _widen(
    allowed: dict[str, float], rounded: Mapping[str, Tensor], expected: Mapping[str, Tensor], factor: float
) -> None:
    """Allow each tensor at least this factor of the distance that rounded weights cause."""
    for name, tensor in expected.items():
        allowed[name] = max(allowed[name], factor * _distance(rounded[name], tensor))


def _scalar(quantity: str, found: float, expected: float, allowed: float) -> Measure:
    return Measure(quantity=quantity, name="", distance=abs(found - expected), allowed=allowed)


def _worst(
    quantity: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: Mapping[str, float]
) -> Measure:
    """The tensor that departs first if any does, else the one nearest to departing."""
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
