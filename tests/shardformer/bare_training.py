"""Compare a training loop without a booster with one process: loss, gradients, weights. Runs on every rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.collectives import all_gather
from echelon.cluster.placement import shard_on
from echelon.shardformer import ShardFormer, clip_grad_norm_
from echelon.verify import reference
from echelon.verify.compare import compare_float32, first_departure
from echelon.verify.reference import StepRecord

from .compare import VOCABULARY, integers

EPSILON, RATE, MAX_NORM = 1e-5, 1e-3, 0.5
LENGTHS = (3, 2)  # samples of a replica's microbatches, which are accumulated


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.01)


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


def causal_batch(num_samples: int, seed: int) -> dict[str, Tensor]:
    ids = integers(3, VOCABULARY, num_samples, 7, seed=seed)
    return {"input_ids": ids, "labels": ids}


def make_steps(num_replicas: int, batch: Callable[[int, int], Any] = causal_batch) -> list[list[list[Any]]]:
    """Return batches by step, replica and microbatch."""
    return [
        [
            [batch(length, 100 * step + 10 * replica + index) for index, length in enumerate(LENGTHS)]
            for replica in range(num_replicas)
        ]
        for step in range(3)
    ]


def departure(
    model: nn.Module,
    split: nn.Module,
    shard_former: ShardFormer,
    *,
    batch: Callable[[int, int], Any] = causal_batch,
    loss_of: Callable[[Any, Any], Tensor] = model_loss,
    after_backward: Callable[[nn.Module], None] = lambda split: None,
) -> str | None:
    """Return the first difference from one process in three steps of AdamW with clipping, or None.

    Args:
        model: the unsharded model; it is not changed.
        split: the sharded copy of it.
        shard_former: the ShardFormer that sharded it.
        after_backward: called after each backward; for mutations.
    """
    config = shard_former.shard_config
    replica = 0 if config.replica_group is None else config.replica_group.rank()
    steps = make_steps(config.data_parallel_size, batch)
    optimizer = make_optimizer(split)
    records = []
    for replicas in steps:
        losses = []
        for microbatch in replicas[replica]:
            loss = loss_of(split(**microbatch), microbatch) / len(LENGTHS)
            loss.backward()
            losses.append(loss.detach())
            after_backward(split)
        gradients = {
            name: _whole(parameter, parameter.grad, config.split_group, name)
            for name, parameter in split.named_parameters()
            if parameter.grad is not None
        }
        norm = clip_grad_norm_(split, MAX_NORM).item()
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        dist.all_reduce(loss)
        weights = {
            name: _whole(parameter, parameter.data, config.split_group, name)
            for name, parameter in split.named_parameters()
        }
        record = StepRecord(
            loss=loss.item() / dist.get_world_size(), norm=norm, gradients=gradients, weights=weights
        )
        records.append(record)
    expected = reference.train(
        model,
        steps,
        make_optimizers=lambda model: [make_optimizer(model)],
        criterion=loss_of,
        dtypes=[torch.float32] * len(steps),
        max_norm=MAX_NORM,
        weigh=lambda *_: 1.0,  # the loop averages its microbatches
    )
    return first_departure(
        compare_float32(records, expected, learning_rate=RATE, epsilon=EPSILON, bitwise=False)
    )


def _whole(parameter: Tensor, tensor: Tensor, group: dist.ProcessGroup | None, name: str) -> Tensor:
    """Return the full tensor from the shards of the tensor axis; NaN if replicas of a shard differ."""
    placement = shard_on(parameter, "tp")
    tensor = tensor.detach().float()
    shards = [tensor] if group is None else list(all_gather(tensor[None], group, 0).unbind(0))
    replicas = len(shards) if placement is None else placement.replicas
    for index, shard in enumerate(shards):
        if not torch.allclose(shard, shards[index // replicas * replicas], rtol=1e-5, atol=1e-9):
            return torch.full_like(tensor, torch.nan)
    return tensor.clone() if placement is None else placement.full(shards).clone()
