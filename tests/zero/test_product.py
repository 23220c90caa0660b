"""Weight gradients of linear layers that are added to where gradients lie, beside autograd's whole ones."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon.shardformer.layers.weight_gradient import (
    defer_weight_gradients,
    give_gradients_to,
)
from echelon.zero.bucket import GradientState
from echelon.zero.optimizer import ShardedOptimizer

from ..pool import Pool
from .helpers import Precision, assert_equal, sgd, shard

PLACE = (0, 0)


def layers() -> nn.Sequential:
    """The same weights on every call; odd sizes."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 70), nn.Tanh(), Conv1D(9, 70), nn.Linear(9, 3, bias=False))


def sharded(model: nn.Module, precision: Precision = "fp32", **arguments: int) -> ShardedOptimizer:
    optimizer = shard(model, sgd, precision=precision, **arguments)
    give_gradients_to(optimizer.reducer, model)
    return optimizer


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def count_products(optimizer: ShardedOptimizer) -> list[tuple[int, ...]]:
    """The shapes of the weights that every call is about from now on."""
    shapes: list[tuple[int, ...]] = []
    reducer = optimizer.reducer
    add = reducer.add_product

    def counting(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        shapes.append(tuple(parameter.shape))
        add(parameter, left, right)

    reducer.add_product = counting  # type: ignore[method-assign]
    return shapes


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_add_up_to_autograds_gradient_to_the_bit(
    pool: Pool, precision: Precision, stage: int
) -> None:
    pool.run(2, check_equal, precision, stage)


def check_equal(precision: Precision, stage: int) -> None:
    ours, theirs = layers(), layers()
    optimizer = sharded(ours, precision, stage=stage)
    plain = shard(theirs, sgd, precision=precision, stage=stage)
    shapes = count_products(optimizer)
    for seed in range(3):
        optimizer.backward(loss_of(ours, seed + 3 * dist.get_rank()))
        plain.backward(loss_of(theirs, seed + 3 * dist.get_rank()))
    for each in (optimizer, plain):
        each.reduce_gradients()
    found, expected = optimizer.gradients(), plain.gradients()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert shapes == 3 * [(3, 9), (70, 9), (70, 5)]


def test_products_that_were_held_back_start_their_bucket(pool: Pool) -> None:
    assert pool.run(2, check_held) == [[False, True], [False, True]]


def check_held() -> list[bool]:
    model, expected, rank = layers(), layers(), dist.get_rank()
    store = defer_weight_gradients(model)
    optimizer = sharded(model, bucket_size=1)
    shapes, started = count_products(optimizer), []
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
    assert len(shapes) == 6
    assert_equal(optimizer.gradients(), {name: each.grad for name, each in expected.named_parameters()})
    return started


class Shared(nn.Sequential):
    """Layers of which all but the last run twice; without biases, whose gradients would hold up a weight's average."""

    @classmethod
    def of(cls) -> "Shared":
        torch.manual_seed(3)
        return cls(
            nn.Linear(5, 70, bias=False),
            nn.Tanh(),
            nn.Linear(70, 9, bias=False),
            nn.Linear(9, 3, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self[2](self[1](self[0](x)))
        return self[3](self[2](self[1](self[0](x.flip(-1)))) + found)


@pytest.mark.parametrize("holds", [False, True])
def test_a_layer_that_runs_twice_waits_for_both(pool: Pool, holds: bool) -> None:
    pool.run(2, check_twice, holds)


def check_twice(holds: bool) -> None:
    model, native, rank = Shared.of(), Shared.of(), dist.get_rank()
    for seed in range(4):
        (loss_of(native, seed) / 2).backward()
    store = defer_weight_gradients(model)
    optimizer = sharded(model, bucket_size=1)
    shapes = count_products(optimizer)
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, rank))
    if holds:
        with store.deferring(PLACE), optimizer.no_sync():
            optimizer.backward(loss_of(model, 2 + rank))
        with optimizer.reducer.last_backward(list(model.parameters())):
            store.compute(PLACE)
    else:
        optimizer.backward(loss_of(model, 2 + rank))
    optimizer.reduce_gradients()
    assert len(shapes) == 10
    assert_equal(optimizer.gradients(), {name: each.grad for name, each in native.named_parameters()})


def frozen() -> nn.Sequential:
    model = layers()
    model[0].weight.requires_grad_(False)
    return model


def computed() -> nn.Sequential:
    model = layers()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def shared_weight() -> nn.Sequential:
    model = layers()
    model.append(nn.Linear(3, 9)).append(nn.Linear(9, 3, bias=False))
    model[5].weight = model[3].weight
    return model


WITHOUT: dict[str, Callable[[], nn.Sequential]] = {
    "tied": shared_weight,
    "frozen": frozen,
    "computed": computed,
}


def test_what_is_not_a_layers_own_is_autograds(pool: Pool) -> None:
    pool.run(1, check_left_alone)


def check_left_alone() -> None:
    for kind, build in WITHOUT.items():
        torch.manual_seed(5)
        model = build()
        native = copy.deepcopy(model)
        optimizer = sharded(model)
        shapes = count_products(optimizer)
        for seed in range(2):
            optimizer.backward(loss_of(model, seed))
            loss_of(native, seed).backward()
        optimizer.reduce_gradients()
        assert shapes and ((3, 9) if kind == "tied" else (70, 5)) not in shapes
        expected = {name: each.grad for name, each in native.named_parameters() if each.grad is not None}
        assert_equal(optimizer.gradients(), expected)


def test_other_backwards_leave_the_bucket_alone(pool: Pool) -> None:
    pool.run(1, check_autograd_grad)


def check_autograd_grad() -> None:
    model, native = layers(), layers()
    optimizer = sharded(model)
    (found,) = torch.autograd.grad(loss_of(model, 1), model[0].weight)
    (expected,) = torch.autograd.grad(loss_of(native, 1), native[0].weight)
    assert found.equal(expected) and model[0].weight.grad is None
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(seen.append)
    optimizer.backward(loss_of(model, 1))
    assert seen[0].equal(expected)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.backward(loss_of(model, 1))
    assert torch.vmap(model)(torch.ones(3, 2, 5)).equal(native(torch.ones(3, 2, 5)))


def test_gradients_of_gradients_are_autograds(pool: Pool) -> None:
    pool.run(1, check_penalty)


def check_penalty() -> None:
    model, native = layers(), layers()
    optimizer = sharded(model)
    shapes = count_products(optimizer)
    with optimizer.reducer.accumulating():  # as in a criterion
        loss = penalized(model)
    assert not shapes
    optimizer.backward(loss)
    penalized(native).backward()
    optimizer.reduce_gradients()
    assert len(shapes) > 3
    assert_equal(optimizer.gradients(), {name: each.grad for name, each in native.named_parameters()})


def penalized(model: nn.Module) -> Tensor:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (of_input,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
    return model(x).mean() + of_input.pow(2).sum()
