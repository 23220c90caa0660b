"""Models in float64: plugins with float32 buckets refuse them, and all others compute in it, to 1e-10."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import ShardConfig, ShardFormer
from echelon.cluster.collectives import all_gather
from echelon.cluster.placement import shard_on
from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..zero.helpers import gradients_of
from .training import boosted, booster_of, full, parts, sgd

MASKED = ModelChoice(model_type="bert", head="masked", tied=True, num_layers=2)
# Torch warns of FSDP models whose outputs are views, as logits of tokens are in float64.
CLASSIFYING = ModelChoice(model_type="bert", num_layers=2)
SAMPLES = 9


def batch_of(choice: ModelChoice, rank: int, size: int) -> tuple[dict[str, Tensor], float]:
    """Return a replica's share of a padded batch, and the factor from its mean to its share of the batch's mean."""
    batch = make_batch(choice, num_samples=SAMPLES, seed=0)
    replica_batch = parts(batch, size)[rank]
    count, total = (int((inputs["labels"] != -100).sum()) for inputs in (replica_batch, batch))
    return replica_batch, count * size / total


def expected(choice: ModelChoice) -> dict[str, Tensor]:
    plain: Any = choice.build().double()
    plain(**batch_of(choice, 0, 1)[0]).loss.backward()
    return gradients_of(plain)


def departing(choice: ModelChoice, gradients: dict[str, Tensor]) -> list[str]:
    """Return the names of missing gradients, and of those that are 1e-10 of their largest entry from one process."""
    wanted = expected(choice)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return sorted(wanted.keys() ^ gradients.keys()) + [
        name
        for name, gradient in gradients.items()
        if gradient.dtype != torch.float64
        or (gradient - wanted[name]).abs().max() > 1e-10 * max(wanted[name].abs().max(), 1e-6 * largest)
    ]


def by_a_booster(kind: str, choice: ModelChoice) -> list[str]:
    booster = booster_of(kind, precision="fp32")
    model, optimizer = boosted(booster, choice.build().double(), sgd)
    batch, factor = batch_of(choice, *booster.plugin.data_rank)
    booster.backward(model(**batch).loss * factor, optimizer)
    return departing(choice, {name: full(grad) for name, grad in gradients_of(model.unwrap()).items()})


@pytest.mark.parametrize(("kind", "choice"), [("ddp", MASKED), ("fsdp", CLASSIFYING)])
def test_torchs_plugins_compute_in_float64(pool: Pool, kind: str, choice: ModelChoice) -> None:
    assert pool.run(2, by_a_booster, kind, choice) == [[], []]


def by_shard_former(sizes: dict[str, int]) -> list[str]:
    shard_former = ShardFormer(ShardConfig(**sizes))
    shard_former.init_distributed()
    model, config = shard_former.shard_model(MASKED.build().double()), shard_former.shard_config
    replica = 0 if config.replica_group is None else config.replica_group.rank()
    batch, factor = batch_of(MASKED, replica, config.data_parallel_size)
    (model(**batch).loss * factor).backward()
    trained = {name: model.get_parameter(name) for name in gradients_of(model)}
    return departing(MASKED, {name: unsharded(parameter, config) for name, parameter in trained.items()})


def unsharded(parameter: nn.Parameter, config: ShardConfig) -> Tensor:
    """Return the gradient of a full parameter."""
    placement, gradient = shard_on(parameter, "tp"), parameter.grad
    if placement is None or config.split_group is None:
        return gradient
    return placement.full(list(all_gather(gradient[None], config.split_group, 0).unbind(0)))


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_shard_former_computes_in_float64(pool: Pool, sizes: dict[str, int]) -> None:
    assert pool.run(2, by_shard_former, sizes) == [[], []]
