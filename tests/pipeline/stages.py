"""Stages run in sequence in one process, compared with the full model."""

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.pipeline.stage import Stage, as_arguments, cut_stages
from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import policy_for
from echelon.verify.batch import loss_of


class Ranks(NamedTuple):
    """A model cut for several ranks: each rank's part, and all stages."""

    parts: list[nn.Module]
    stages: list[Stage]


def plan_of(model: nn.Module) -> StagePlan:
    """Return the stage plan of the model's table."""
    policy = policy_for(model)
    policy.set_model(model)
    plan = policy.stage_plan()
    assert plan is not None
    return plan


def cut(model: nn.Module, plan: StagePlan, stage_ranks: Sequence[int], bounds: Sequence[int]) -> Ranks:
    """Return copies of the model, one per rank, each cut to the rank's stages."""
    parts, stages = [], {}
    for rank in range(max(stage_ranks) + 1):
        rank_model = copy.deepcopy(model)
        local = [stage for stage, holder in enumerate(stage_ranks) if holder == rank]
        parts.append(rank_model)
        stages.update(cut_stages(rank_model, plan, stages=local, bounds=bounds))
    return Ranks(parts, [stages[index] for index in range(len(stage_ranks))])


def scalar(outputs: Any) -> Tensor:
    """Return the model's loss, or a mean of its outputs."""
    return outputs.square().mean() if isinstance(outputs, Tensor) else loss_of(outputs, None)


def train(stages: Sequence[Stage], batch: Any) -> Tensor:
    """Run forward and backward through all stages in sequence; return the loss."""
    arrived: list[tuple[Tensor, ...]] = []
    sent: list[tuple[Tensor, ...]] = []
    received: tuple[Tensor, ...] = ()
    for stage in stages:
        outputs = stage.forward(batch, received)
        if not stage.is_last:
            sent.append(outputs)
            received = tuple(tensor.detach().requires_grad_() for tensor in outputs)
            arrived.append(received)
    loss = scalar(outputs)
    loss.backward()
    for tensors, leaves in zip(reversed(sent), reversed(arrived), strict=True):
        used = [
            (tensor, leaf.grad) for tensor, leaf in zip(tensors, leaves, strict=True) if leaf.grad is not None
        ]
        torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])
    return loss


def require_same(model: nn.Module, ranks: Ranks, batch: Any, *, tolerance: float) -> None:
    """Compare the stages' loss and gradients with the full model's; every parameter must be on a stage.

    Args:
        model: the full model; its gradients are dropped.
        tolerance: the tolerance of the loss, and of gradients relative to the largest one.
    """
    reference = copy.deepcopy(model)
    args, kwargs = as_arguments(batch)
    expected = scalar(reference(*args, **kwargs))
    expected.backward()
    loss = train(ranks.stages, batch)
    assert abs(loss.item() - expected.item()) <= tolerance * max(1.0, abs(expected.item()))
    summed = summed_gradients(reference, ranks)
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        gradient = summed[name]
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            departure = (gradient - parameter.grad).abs().max().item()
            assert departure <= tolerance * largest, f"{name} departs by {departure / largest:.1e}"


def summed_gradients(reference: nn.Module, ranks: Ranks) -> dict[str, Tensor | None]:
    """Return by a parameter's first name the sum of the gradients of all its replicas, each rank's once."""
    first = {parameter: name for name, parameter in reference.named_parameters()}
    names = {name: first[parameter] for name, parameter in reference.named_parameters(remove_duplicate=False)}
    by_rank = [
        {
            names[name]: parameter.grad
            for name, parameter in rank_model.named_parameters(remove_duplicate=False)
        }
        for rank_model in ranks.parts
    ]
    assert set().union(*by_rank) == set(first.values())
    summed: dict[str, Tensor | None] = {}
    for name in first.values():
        gradients = [grads[name] for grads in by_rank if grads.get(name) is not None]
        summed[name] = reduce(torch.add, gradients) if gradients else None
    return summed
