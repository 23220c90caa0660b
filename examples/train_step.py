"""One training step under any plugin, for the examples."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import Booster, TorchDDPPlugin


def train_step(
    booster: Booster,
    model: nn.Module,
    optimizer: Any,
    batches: Iterator,
    *,
    criterion: Callable | None = None,
    max_norm: float,
) -> tuple[float, float]:
    """Compute the gradients of the next batch and update the weights. Collective over the world.

    Args:
        criterion: see `Booster.execute_pipeline`; torch's DDP uses `outputs.loss`.
        max_norm: maximum gradient norm for torch's DDP, which has no such option; 0 does not clip.

    Returns:
        On every rank the loss and the gradient norm before clipping. The loss is the mean over replicas, under torch's
        DDP the local one.
    """
    if isinstance(booster.plugin, TorchDDPPlugin):
        loss = model(**on_device_of(model, next(batches))).loss
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(max_norm or math.inf).item()
        optimizer.step()
    else:
        loss = booster.execute_pipeline(batches, model, criterion, optimizer)["loss"]
        optimizer.step()
        norm = optimizer.get_grad_norm()
    optimizer.zero_grad()
    return loss.item(), norm


def on_device_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch on the model's device; `execute_pipeline` moves batches itself."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def mean_over_replicas(value: float) -> float:
    """Average over replicas a figure that is equal on all ranks of a replica. All-reduce over the world."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
