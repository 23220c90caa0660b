"""Comparing a layout's steps with the reference's: what is allowed, and the first quantity that departs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import StepRecord

# Distances to float32 may exceed the reference's own, in the same 16-bit precision, by this much.
ALLOWED_16_BIT = 1.5


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity beside its reference.

    Args:
        quantity: "loss", "gradient", "norm" or "weight".
        name: the worst tensor; empty for a scalar.
        distance: how far it is from the reference (in 16 bits: from float32).
        allowed: how far it may be.
    """

    quantity: str
    name: str
    distance: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether it is as near as it has to be; not a number is not."""
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
    found: Sequence[StepRecord], expected: Sequence[StepRecord], *, learning_rate: float, bitwise: bool
) -> list[StepComparison]:
    """Compare float32 runs tensor by tensor.

    Loss 1e-6 (relative to max(1, loss)); gradients 1e-5 × max(largest entry of the tensor, 1e-3 × largest of
    all), since a gradient that is mathematically zero is noise; weights 1e-5 × largest entry + 1e-3 × learning
    rate, since AdamW divides gradients by their own size.

    Args:
        bitwise: the first step's loss and gradients must be equal (a pipeline alone, nothing tied). Later
            steps follow from weights that an update in another memory layout may round differently.
    """
    compared = []
    for index, (own, other) in enumerate(zip(found, expected, strict=True)):
        exact = bitwise and index == 0
        largest = max(gradient.abs().max().item() for gradient in other.gradients.values())
        gradient_allowed = {
            name: 0.0 if exact else 1e-5 * max(gradient.abs().max().item(), 1e-3 * largest)
            for name, gradient in other.gradients.items()
        }
        weight_allowed = {
            name: 1e-5 * weight.abs().max().item() + 1e-3 * learning_rate
            for name, weight in other.weights.items()
        }
        measures = (
            _scalar("loss", own.loss, other.loss, 0.0 if exact else 1e-6 * max(1.0, abs(other.loss))),
            _worst("gradient", own.gradients, other.gradients, gradient_allowed),
            _scalar("norm", own.norm, other.norm, 1e-5 * other.norm),
            _worst("weight", own.weights, other.weights, weight_allowed),
        )
        compared.append(
            StepComparison(step=index + 1, loss=own.loss, reference_loss=other.loss, measures=measures)
        )
    return compared


def compare_16_bit(
    found: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    float32: Sequence[StepRecord],
    *,
    dtype: torch.dtype,
    learning_rate: float,
) -> list[StepComparison]:
    """Compare distances to the float32 run: the layout's may be 1.5 times the reference's in the same precision.

    A tensor's distance is the norm of the difference. A distance that happens to be tiny for the reference
    says nothing, so no quantity has to be nearer than the precision's rounding of it, and no tensor nearer
    than a share of the distance of all of them together.
    """
    rounding = torch.finfo(dtype).eps
    compared = []
    for index, (own, other, exact) in enumerate(zip(found, expected, float32, strict=True)):
        floors = {"gradient": rounding * exact.norm, "weight": learning_rate}
        measures = [
            _scalar(
                "loss",
                own.loss,
                exact.loss,
                ALLOWED_16_BIT * max(abs(other.loss - exact.loss), rounding * abs(exact.loss)),
            )
        ]
        for quantity, own_tensors, other_tensors, exact_tensors in (
            ("gradient", own.gradients, other.gradients, exact.gradients),
            ("weight", own.weights, other.weights, exact.weights),
        ):
            allowed = _allowed_distances(other_tensors, exact_tensors, floors[quantity])
            measures.append(_worst(quantity, own_tensors, exact_tensors, allowed, norm=True))
        norm_allowed = ALLOWED_16_BIT * max(abs(other.norm - exact.norm), rounding * exact.norm)
        measures.insert(2, _scalar("norm", own.norm, exact.norm, norm_allowed))
        compared.append(
            StepComparison(step=index + 1, loss=own.loss, reference_loss=other.loss, measures=tuple(measures))
        )
    return compared


def first_departure(comparisons: Sequence[StepComparison]) -> str | None:
    """The first quantity that departs from the reference, in words, or None."""
    for comparison in comparisons:
        for measure in comparison.measures:
            if not measure.agrees:
                return f"step {comparison.step}: {measure}"
    return None


def _allowed_distances(
    reference: Mapping[str, Tensor], exact: Mapping[str, Tensor], floor: float
) -> dict[str, float]:
    distances = {name: (reference[name] - tensor).norm().item() for name, tensor in exact.items()}
    together = torch.tensor(list(distances.values())).norm().item()
    share = together / max(len(distances), 1) ** 0.5
    return {name: ALLOWED_16_BIT * max(distance, share, floor) for name, distance in distances.items()}


def _scalar(quantity: str, found: float, expected: float, allowed: float) -> Measure:
    return Measure(quantity=quantity, name="", distance=abs(found - expected), allowed=allowed)


def _worst(
    quantity: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    allowed: Mapping[str, float],
    *,
    norm: bool = False,
) -> Measure:
    """The tensor that departs first if any does, else the one nearest to departing; missing or extra ones depart."""
    for name in (*expected, *found):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            return Measure(quantity=quantity, name=name, distance=float("inf"), allowed=0.0)
    measures = []
    for name, tensor in expected.items():
        difference = found[name].float() - tensor
        distance = (difference.norm() if norm else difference.abs().max()).item()
        measures.append(Measure(quantity=quantity, name=name, distance=distance, allowed=allowed[name]))
    departed = [measure for measure in measures if not measure.agrees]
    if departed:
        return departed[0]
    return max(measures, key=lambda measure: measure.distance / measure.allowed if measure.allowed else 0.0)
