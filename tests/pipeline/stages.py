"""Stages run one after another in one process, against the whole model."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.pipeline.plan import StagePlan
from echelon.pipeline.stage import Stage, cut_stages
from echelon.shardformer import policy_for


class Ranks(NamedTuple):
    """A model cut for several ranks: each rank's part of it, and all stages."""

    parts: list[nn.Module]
    stages: list[Stage]


def plan_of(model: nn.Module) -> StagePlan:
    """The stage plan that the model's table gives it."""
    policy = policy_for(model)
    policy.set_model(model)
    plan = policy.stage_plan()
    assert plan is not None
    return plan


def cut(model: nn.Module, plan: StagePlan, placement: Sequence[int], bounds: Sequence[int]) -> Ranks:
    """Copies of the model, one per rank, each cut to the rank's stages."""
    parts, stages = [], {}
    for rank in range(max(placement) + 1):
        part = copy.deepcopy(model)
        own = [stage for stage, holder in enumerate(placement) if holder == rank]
        parts.append(part)
        stages.update(cut_stages(part, plan, stages=own, bounds=bounds))
    return Ranks(parts, [stages[index] for index in range(len(placement))])


def scalar(outputs: Any) -> Tensor:
    """The model's loss; without one, of what it returns first."""
    loss = getattr(outputs, "loss", None)
    return outputs[0].square().mean() if loss is None else loss


def train(stages: Sequence[Stage], batch: Any, criterion: Callable[[Any], Tensor] = scalar) -> Tensor:
    """Forward and backward through all stages in turn. Returns the loss."""
    arrived: list[tuple[Tensor, ...]] = []
    sent: list[tuple[Tensor, ...]] = []
    received: tuple[Tensor, ...] = ()
    for stage in stages:
        outputs = stage.forward(batch, received)
        if not stage.is_last:
            sent.append(outputs)
            received = tuple(tensor.detach().requires_grad_() for tensor in outputs)
            arrived.append(received)
    loss = criterion(outputs)
    loss.backward()
    for tensors, leaves in zip(reversed(sent), reversed(arrived), strict=True):
        used = [
            (tensor, leaf.grad) for tensor, leaf in zip(tensors, leaves, strict=True) if leaf.grad is not None
        ]
        torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])
    return loss


def gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor | None]:
    """The gradients by name, summed over the ranks that hold a parameter."""
    found: dict[str, Tensor | None] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            before, gradient = found.get(name), parameter.grad
            both = before is not None and gradient is not None
            found[name] = before + gradient if both else gradient if before is None else before  # type: ignore[operator]
    return found
