"""The reference: one process, a plain torch loop. It imports nothing of Echelon, to share no mistake with it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one training step gave.

    Args:
        loss: the mean over replicas and microbatches.
        norm: the norm of all gradients, before clipping.
        gradients: by parameter name, before clipping, float32.
        weights: by parameter name after the step, float32 (the masters, in 16 bits).
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Sequence[dict[str, Tensor]]]],
    *,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    criterion: Callable[[object, object], Tensor],
    dtype: torch.dtype,
    max_norm: float = 0.0,
    loss_scale: float = 1.0,
) -> list[StepRecord]:
    """Train a copy of the model on one process.

    With a 16-bit dtype a copy of that dtype computes, gradients are added up in float32, and the optimizer
    updates float32 weights that are copied back.

    Args:
        model: float32; left as it is.
        steps: by step, by replica, the microbatches.
        make_optimizer: builds the optimizer for a model.
        criterion: from outputs and microbatch to a loss.
        max_norm: clip to this norm; 0 does not.
        loss_scale: multiplied onto every loss, and taken out of the gradients again.
    """
    masters = copy.deepcopy(model)
    worker = masters if dtype is torch.float32 else _cast(copy.deepcopy(model), dtype)
    optimizer = make_optimizer(masters)
    return [
        _step(
            masters,
            worker,
            optimizer,
            replicas,
            criterion=criterion,
            max_norm=max_norm,
            loss_scale=loss_scale,
        )
        for replicas in steps
    ]


def _step(
    masters: nn.Module,
    worker: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicas: Sequence[Sequence[dict[str, Tensor]]],
    *,
    criterion: Callable[[object, object], Tensor],
    max_norm: float,
    loss_scale: float,
) -> StepRecord:
    worker_parameters = dict(worker.named_parameters())
    sums: dict[str, Tensor] = {}
    losses = []
    for microbatches in replicas:
        parts = []
        for microbatch in microbatches:
            part = criterion(worker(**microbatch), microbatch)
            parts.append(part.detach().float())
            (part * loss_scale / len(microbatches)).backward()
            for name, parameter in worker_parameters.items():
                if parameter.grad is not None:
                    added = parameter.grad.float() / (len(replicas) * loss_scale)
                    sums[name] = added if name not in sums else sums[name] + added
                    parameter.grad = None
        losses.append(torch.stack(parts).sum() / len(parts))

    for name, parameter in masters.named_parameters():
        parameter.grad = sums.get(name)
    gradients = {name: gradient.clone() for name, gradient in sums.items()}
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()])).item()
    if max_norm > 0:
        torch.nn.utils.clip_grad_norm_(masters.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    if worker is not masters:
        with torch.no_grad():
            for name, parameter in masters.named_parameters():
                worker_parameters[name].copy_(parameter)
    weights = {name: parameter.detach().clone() for name, parameter in masters.named_parameters()}
    return StepRecord(loss=torch.stack(losses).mean().item(), norm=norm, gradients=gradients, weights=weights)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters in another dtype; buffers (rotary frequencies) stay what they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
