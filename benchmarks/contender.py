"""Contenders of a benchmark, and the checks that they all compute the same."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Relative to the largest entry. Another order of summation differs by some 1e-6; a wrong scale, mask or label by more.
TOLERANCE = 1e-4


class Contender(Protocol):
    """A way of training the workload on the processes of the run. All methods are called on every rank."""

    name: str

    def compute(self) -> None:
        """Compute loss and gradients of the batch."""

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""

    def forget(self) -> None:
        """Drop the gradients without a step."""

    def loss(self) -> Tensor | None:
        """Return the mean loss of the last `compute`; None on a rank without it. May communicate."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's gradients after `compute`, by the model's parameter names. May communicate."""


def agreement(contenders: Sequence[Contender], reference: Contender) -> dict[str, dict[str, float]]:
    """Return the relative distance of each contender's loss and gradients from the reference; the largest of all ranks.

    Communicates. Every parameter of the model must be on some rank.

    Args:
        contenders: each runs once, and its gradients are dropped.
        reference: the same computation in one process, run here on every rank.

    Raises:
        ValueError: a contender departs by more than `TOLERANCE`.
    """
    reference.compute()
    expected_loss, expected = reference.loss(), dict(reference.gradients())
    assert expected_loss is not None
    verdicts = {}
    for contender in contenders:
        contender.compute()
        loss = contender.loss()
        loss_error = 0.0 if loss is None else _distance(loss, expected_loss)
        gradients = contender.gradients()
        gradient_error = max((_distance(gradients[name], expected[name]) for name in gradients), default=0.0)
        held = torch.tensor([name in gradients for name in expected], dtype=torch.float64)
        verdicts[contender.name] = _verdict(
            contender.name, loss_error, gradient_error, held, loss is not None
        )
        contender.forget()
    reference.forget()
    return verdicts


def require_equal_training(contenders: Sequence[Contender]) -> dict[str, float]:
    """Return the losses of contenders after the same number of steps; finds skipped and wrong steps.

    Communicates. Each runs once, and its gradients are dropped.

    Raises:
        ValueError: one is further than `TOLERANCE` from the median of all.
    """
    losses = {}
    for contender in contenders:
        contender.compute()
        loss = contender.loss()
        known = torch.tensor(-inf if loss is None else loss.item(), dtype=torch.float64)
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        losses[contender.name] = known.item()
        contender.forget()
    middle = median(losses.values())
    if not all(abs(loss - middle) <= TOLERANCE * abs(middle) for loss in losses.values()):
        by_name = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        raise ValueError(f"after equally many steps on the same data the losses differ: {by_name}")
    return losses


def _distance(tensor: Tensor, expected: Tensor) -> float:
    distance = ((tensor - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
    return distance if isfinite(distance) else inf  # a maximum may drop a NaN


def _verdict(name: str, loss: float, gradient: float, held: Tensor, knows: bool) -> dict[str, float]:
    numbers = torch.cat([torch.tensor([loss, gradient, float(knows)], dtype=torch.float64), held])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    loss, gradient, is_known, *is_held = numbers.tolist()
    if not (is_known and all(is_held) and max(loss, gradient) <= TOLERANCE):
        raise ValueError(
            f"{name} does not compute what one process does: its loss is off by {loss:.1e} of it, its "
            f"gradients by {gradient:.1e} of their largest entry, and {is_held.count(0.0)} parameters got none; "
            f"{TOLERANCE:.0e} is allowed"
        )
    return {"loss": loss, "gradients": gradient}
