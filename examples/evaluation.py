"""Evaluation of a boosted model under any layout, with every sample counted once; examples supply the figures."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_step import on_device_of

from echelon import Booster, TorchDDPPlugin

Batch = dict[str, Tensor]


def outputs_of(booster: Booster, model: nn.Module, batch: Batch) -> Any | None:
    """Return the outputs for a batch of this replica; None on ranks without the last stage. Collective over the world.

    Logits are gathered from tensor-parallel ranks.
    """
    if isinstance(booster.plugin, TorchDDPPlugin):
        return model(**on_device_of(model, batch))
    return booster.execute_pipeline(iter([batch]), model, return_loss=False, return_outputs=True)["outputs"]


@torch.no_grad()
def sums_over(
    booster: Booster,
    model: nn.Module,
    dataset: Sequence[Batch],
    *,
    batch_size: int,
    names: Sequence[str],
    figures: Callable[[Batch], Tensor | None],
) -> dict[str, float]:
    """Sum figures over a data set, each sample once, and return them on every rank. Collective over the world.

    Args:
        dataset: samples; each replica evaluates its shard.
        batch_size: global batch size, over all replicas.
        names: names of the figures.
        figures: function of a local batch that returns (samples, figures), or None on ranks without its outputs.
    """
    model.eval()
    replica, num_replicas = booster.plugin.data_rank
    # Pad the last batch with samples from the start: a short one may have too few for the microbatches.
    filled = math.ceil(len(dataset) / batch_size) * batch_size
    rows = [dataset[row % len(dataset)] for row in range(filled)]
    per_replica = batch_size // num_replicas
    total = torch.zeros(len(names), dtype=torch.float64)
    for number, batch in enumerate(booster.plugin.prepare_dataloader(rows, batch_size=per_replica)):
        found = figures(batch)
        if found is not None:
            # The sampler yields every n-th sample; padding samples are the last and already counted.
            positions = (torch.arange(per_replica) + number * per_replica) * num_replicas + replica
            total += found.cpu().double()[positions < len(dataset)].sum(0)
    dist.all_reduce(total)
    model.train()
    # All ranks of a tensor-parallel group count the same outputs.
    return dict(zip(names, (total / booster.plugin.tp_size).tolist(), strict=True))
