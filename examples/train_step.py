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
    """Take the next batch, compute gradients, update. Collective over the world.

    Args:
        criterion: see `Booster.execute_pipeline`; torch's DDP takes `outputs.loss`.
        max_norm: for torch's DDP, which has no such option itself: clip to it; 0 does not.

    Returns:
        The mean loss over replicas (under torch's DDP that of this replica's batch), and the gradients' norm before
        clipping; on every rank.
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
    """The batch where the model is; `execute_pipeline` does this itself."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def mean_over_replicas(value: float) -> float:
    """The mean of a figure that all ranks of a replica share. All-reduce over the world."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
