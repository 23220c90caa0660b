"""Evaluating a boosted model under any layout: every sample is counted once. What is counted is the example's."""

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
    """The outputs for a batch of this replica; None on ranks without the last stage. Collective over the world.

    Logits are whole, also where tensor parallelism splits them.
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
    """Figures summed over a data set, each sample once, on every rank. Collective over the world.

    Args:
        dataset: samples; each replica takes its share.
        batch_size: of all replicas together.
        names: what the figures are.
        figures: (samples, figures) of a batch, or None on the ranks that do not have its outputs.
    """
    model.eval()
    replica, num_replicas = booster.plugin.data_rank
    # Whole batches only, the last one filled up from the start: a short one may have too few samples to be cut.
    filled = math.ceil(len(dataset) / batch_size) * batch_size
    rows = [dataset[row % len(dataset)] for row in range(filled)]
    per_replica = batch_size // num_replicas
    total = torch.zeros(len(names), dtype=torch.float64)
    for number, batch in enumerate(booster.plugin.prepare_dataloader(rows, batch_size=per_replica)):
        found = figures(batch)
        if found is not None:
            # The sampler gives every n-th sample; what was filled up stands last and was counted already.
            positions = (torch.arange(per_replica) + number * per_replica) * num_replicas + replica
            total += found.cpu().double()[positions < len(dataset)].sum(0)
    dist.all_reduce(total)
    model.train()
    # All ranks of a tensor group count the same outputs.
    return dict(zip(names, (total / booster.plugin.tp_size).tolist(), strict=True))
