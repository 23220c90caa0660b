"""Gradients of embeddings that are added row by row, beside autograd's whole ones."""

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.shardformer.layers.weight_gradient import give_gradients_to, summed_by_row
from echelon.zero.optimizer import ShardedOptimizer

from ..pool import Pool
from .helpers import Precision, assert_equal, sgd, shard

ENTRIES = 23


def language_model(**arguments: int) -> nn.Sequential:
    """A table of 23 rows, and a layer on it; the same weights on every call."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(ENTRIES, 6, **arguments), nn.Linear(6, 4))


def batches(count: int) -> list[Tensor]:
    """Entries that repeat within and between batches; 7 of them, or 1."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(0, 9, (1, 7) if number % 2 else (1, 1), generator=generator) for number in range(count)
    ]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids).float() * torch.arange(4)).pow(2).sum()


def sharded(model: nn.Sequential, precision: Precision = "fp32") -> ShardedOptimizer:
    optimizer = shard(model, sgd, precision=precision)
    give_gradients_to(optimizer.reducer, model)
    return optimizer


def count_rows(optimizer: ShardedOptimizer) -> list[int]:
    """How many entries every call brings from now on."""
    counts: list[int] = []
    reducer = optimizer.reducer
    add = reducer.add_rows

    def counting(parameter: nn.Parameter, rows_N: Tensor, values_NH: Tensor) -> None:
        counts.append(len(rows_N))
        add(parameter, rows_N, values_NH)

    reducer.add_rows = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("arguments", [{}, {"padding_idx": 3}], ids=["plain", "padding"])
def test_rows_add_up_to_autograds_gradient_to_the_bit(
    pool: Pool, arguments: dict[str, int], precision: Precision
) -> None:
    assert pool.run(1, check_equal, arguments, precision) == [[1, 7, 1, 7]]


def check_equal(arguments: dict[str, int], precision: Precision) -> list[int]:
    ours, theirs = language_model(**arguments), language_model(**arguments)
    optimizer = sharded(ours, precision)
    plain = shard(theirs, sgd, precision=precision)
    counts = count_rows(optimizer)
    for ids in batches(4):
        optimizer.backward(loss_of(ours, ids))
        plain.backward(loss_of(theirs, ids))
    for each in (optimizer, plain):
        each.reduce_gradients()
    found, expected = optimizer.gradients(), plain.gradients()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert found["0.weight"].count_nonzero() > 0
    return counts


def test_a_sum_by_row_is_that_of_the_whole_table() -> None:
    ids = torch.tensor([4, 1, 4, 4, 0])
    gradient = torch.randn(5, 3)
    rows, values = summed_by_row(ids, gradient, padding_idx=1)
    whole = torch.ops.aten.embedding_dense_backward(gradient, ids, 6, 1, False)
    assert torch.zeros(6, 3).index_add_(0, rows, values).equal(whole)


def test_autograd_grad_gets_a_gradient_and_leaves_the_bucket_alone(pool: Pool) -> None:
    pool.run(1, check_autograd_grad)


def check_autograd_grad() -> None:
    model, native = language_model(), language_model()
    optimizer = sharded(model)
    ids = batches(2)[1]
    weight = model[0].weight
    (found,) = torch.autograd.grad(loss_of(model, ids), weight)
    (expected,) = torch.autograd.grad(loss_of(native, ids), native[0].weight)
    assert found.equal(expected)
    assert weight.grad is None
    with optimizer.reducer.accumulating():  # as a penalty on gradients within the loss of a backward
        (found,) = torch.autograd.grad(loss_of(model, ids), weight, create_graph=True)
    assert found.equal(expected) and found.requires_grad
    loss_of(model, ids).backward()  # not through the optimizer: autograd's own way
    assert weight.grad is not None and weight.grad.equal(expected)


WITHOUT_ROWS: dict[str, Callable[[], nn.Sequential]] = {
    "tied": lambda: tied(language_model()),
    "max_norm": lambda: nn.Sequential(nn.Embedding(ENTRIES, 6, max_norm=1.0), nn.Linear(6, 4)),
    "by frequency": lambda: nn.Sequential(nn.Embedding(ENTRIES, 6, scale_grad_by_freq=True), nn.Linear(6, 4)),
    "frozen": lambda: frozen(language_model()),
}


def tied(model: nn.Sequential) -> nn.Sequential:
    head = nn.Linear(6, ENTRIES, bias=False)
    head.weight = model[0].weight
    return nn.Sequential(model[0], head, nn.Linear(ENTRIES, 4))


def frozen(model: nn.Sequential) -> nn.Sequential:
    model[0].weight.requires_grad_(False)
    return model


def test_what_needs_the_whole_gradient_is_autograds(pool: Pool) -> None:
    pool.run(1, check_left_alone)


def check_left_alone() -> None:
    for kind, build in WITHOUT_ROWS.items():
        torch.manual_seed(5)
        model = build()
        native = copy.deepcopy(model)
        optimizer = sharded(model)
        counts = count_rows(optimizer)
        for ids in batches(4):
            optimizer.backward(loss_of(model, ids))
            loss_of(native, ids).backward()
        optimizer.reduce_gradients()
        named = native.named_parameters()
        expected = {name: each.grad for name, each in named if each.grad is not None}
        assert_equal(optimizer.gradients(), expected)
        assert not counts, kind


def test_a_users_hook_sees_the_whole_gradient(pool: Pool) -> None:
    pool.run(1, check_hook)


def check_hook() -> None:
    model = language_model()
    optimizer = sharded(model)
    seen: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    optimizer.backward(loss_of(model, batches(1)[0]))
    assert [each.shape for each in seen] == [(ENTRIES, 6)]


def test_a_copied_model_and_one_whose_optimizer_is_gone_train_on_their_own(pool: Pool) -> None:
    pool.run(1, check_copy)


def check_copy() -> None:
    model = language_model()
    optimizer = sharded(model)
    ids = batches(2)[1]
    copied = copy.deepcopy(model)
    with optimizer.reducer.accumulating():
        loss_of(copied, ids).backward()
    assert copied[0].weight.grad is not None and model[0].weight.grad is None
    del optimizer
    gc.collect()
    loss_of(model, ids).backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.equal(copied[0].weight.grad)


class Twice(nn.Sequential):
    """Looks up two batches in one table, and may use the table as a matrix besides."""

    def forward(self, ids: Tensor) -> Tensor:
        found = self[0](ids) + self[0](ids.flip(1) // 2)
        return self[1](found) + (found @ self[0].weight.t())[..., :4] * self.share

    share = 0.0


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_table_that_is_used_twice_waits_for_both(pool: Pool, stage: int, share: float) -> None:
    pool.run(2, check_twice, stage, share)


def check_twice(stage: int, share: float) -> None:
    rank = dist.get_rank()
    model, native = Twice(*language_model()), Twice(*language_model())
    model.share = native.share = share
    for each in batches(4):
        (loss_of(native, each) / 2).backward()
    optimizer = shard(model, sgd, stage=stage, bucket_size=1)
    give_gradients_to(optimizer.reducer, model)
    counts = count_rows(optimizer)
    for number, ids in enumerate(batches(4)[rank::2]):
        context = optimizer.reducer.last_backward if number else optimizer.reducer.every_backward
        with context(list(model.parameters())):
            optimizer.backward(loss_of(model, ids))
    optimizer.reduce_gradients()
    assert len(counts) == 4
    assert_equal(optimizer.gradients(), {name: each.grad for name, each in native.named_parameters()})


def test_a_boosted_model_is_saved_traced_and_transformed_as_before(pool: Pool) -> None:
    pool.run(1, check_uses)


def check_uses() -> None:
    model, native = language_model(), language_model()
    optimizer = sharded(model)
    counts = count_rows(optimizer)
    optimizer.backward(
        loss_of(model, torch.arange(ENTRIES).view(1, -1))
    )  # as many entries as rows: added whole
    assert not counts
    ids = torch.tensor([[4, 1, 4]])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(ids).equal(native(ids))
    assert torch.vmap(model)(ids).equal(native(ids))
    optimizer.backward(loss_of(model, ids))
    assert counts == [3]
