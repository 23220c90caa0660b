"""Deferred weight gradients under the sharded optimizer, compared with autograd's own."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from echelon.shardformer.layers.deferred_linear import track_weight_gradients
from echelon.zero.bucket import GradientState

from ..pool import Pool, on_ranks
from .helpers import assert_equal, gradients_of, sgd, shard

PLACE = (0, 0)


def layers() -> nn.Sequential:
    """Make a model of odd sizes, with the same weights on every call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 70), nn.Tanh(), Conv1D(9, 70), nn.Linear(9, 3, bias=False))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def test_deferred_gradients_start_their_bucket(pool: Pool) -> None:
    assert pool.run(2, check_started) == [[False, True], [False, True]]


def check_started() -> list[bool]:
    model, expected, rank = layers(), layers(), dist.get_rank()
    store = track_weight_gradients(model)
    optimizer = shard(model, sgd, bucket_size=1)
    started = []
    for seed in range(4):
        (loss_of(expected, seed) / 2).backward()
    for last in (False, True):
        reducer = optimizer.reducer
        context = reducer.last_backward if last else reducer.every_backward
        with store.deferring(PLACE), optimizer.no_sync():
            optimizer.backward(loss_of(model, 2 * last + rank))
        with context(list(model.parameters())):
            store.compute(PLACE)
            started.append(any(bucket.state is GradientState.REDUCING for bucket in optimizer.buckets))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), gradients_of(expected))
    return started


class Shared(nn.Sequential):
    """Layers without biases, of which all but the last run twice; a bias gradient would delay a weight's average."""

    @classmethod
    def of(cls) -> "Shared":
        torch.manual_seed(3)
        return cls(
            nn.Linear(5, 70, bias=False), nn.Tanh(), nn.Linear(70, 9, bias=False), nn.Linear(9, 3, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[2](self[1](self[0](x)))
        return self[3](self[2](self[1](self[0](x.flip(-1)))) + hidden)


@pytest.mark.parametrize("is_deferred", [False, True])
@on_ranks(2)
def test_a_layer_that_runs_twice_waits_for_both(is_deferred: bool) -> None:
    model, native, rank = Shared.of(), Shared.of(), dist.get_rank()
    for seed in range(4):
        (loss_of(native, seed) / 2).backward()
    store = track_weight_gradients(model)
    optimizer = shard(model, sgd, bucket_size=1)
    for seed, context in ((rank, optimizer.no_sync), (2 + rank, nullcontext)):
        if is_deferred:
            with store.deferring(PLACE), optimizer.no_sync():
                optimizer.backward(loss_of(model, seed))
            in_last = optimizer.reducer.last_backward(list(model.parameters()))
            with optimizer.reducer.accumulating() if seed < 2 else in_last:
                store.compute(PLACE)
        else:
            with context(), store.adding():
                optimizer.backward(loss_of(model, seed))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), gradients_of(native))


class Checkpointed(Shared):
    def forward(self, x: Tensor) -> Tensor:
        first = self[0](x)
        both = sum(checkpoint(self[2], hidden, use_reentrant=True) for hidden in (first, self[1](first)))
        return self[3](both)


@on_ranks(2)
def test_a_product_is_not_added_to_an_average_in_flight() -> None:
    """Reentrant checkpoints accumulate the gradient of a shared weight in several backwards inside one."""
    model, rank = Checkpointed.of(), dist.get_rank()
    store = track_weight_gradients(model)
    optimizer = shard(model, sgd, bucket_size=1)
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, rank))
    with pytest.raises(RuntimeError, match="adds to gradients that are being averaged"), store.adding():
        optimizer.backward(loss_of(model, 2 + rank))
