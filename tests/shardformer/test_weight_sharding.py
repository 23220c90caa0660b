"""Single weight-parallel linear layers on 2 and 4 ranks, compared with plain ones on the inputs of all ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import shard_on
from echelon.cluster.traffic import Traffic
from echelon.shardformer.layers import gathered_linear
from echelon.shardformer.layers.gathered_linear import PrefetchOrder, ShardedLinear, Use
from echelon.shardformer.weight_sharding import apply_weight_sharding, weight_model_errors

from ..pool import Pool
from ..slow import slow
from .compare import named, numbers

B, S = 2, 5
WIDTHS = (6, 7, 10, 9, 3)  # on purpose, the ranks do not divide all of them


class Block(nn.Module):
    """A linear layer with a norm and an activation."""

    def __init__(self, inputs: int, outputs: int, *, transposed: bool) -> None:
        super().__init__()
        self.linear = Conv1D(outputs, inputs) if transposed else nn.Linear(inputs, outputs, bias=inputs != 7)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


def make_model() -> nn.Sequential:
    """Build four layers of both kinds, and a head that is not sharded."""
    torch.manual_seed(3)
    blocks = [Block(*sizes, transposed=index == 2) for index, sizes in enumerate(pairwise(WIDTHS))]
    return nn.Sequential(*blocks, nn.Linear(WIDTHS[-1], 4))


def make_parallel(**arguments: Any) -> nn.Sequential:
    model = make_model()
    apply_weight_sharding(model, list(model)[:-1], dist.group.WORLD, **arguments)
    return model


def loss_of(model: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    return (model(numbers(B, S, WIDTHS[0], seed=rank)) * numbers(B, S, 4, seed=9)).sum()


def mean_gradients(model: nn.Module, times: int = 1) -> dict[str, Tensor]:
    """Return mean gradients over the inputs of all ranks for sharded parameters, and local ones for replicated."""
    size, rank = dist.get_world_size(), dist.get_rank()
    plain = make_model()
    weights = [name for name, parameter in model.named_parameters() if shard_on(parameter, "wp") is not None]
    for source_rank in range(size):
        (loss_of(plain, source_rank) * times / size).backward()
    mean = {name: parameter.grad for name, parameter in plain.named_parameters() if name in weights}
    local_model = make_model()
    (loss_of(local_model, rank) * times).backward()
    return {name: mean.get(name, parameter.grad) for name, parameter in local_model.named_parameters()}


def require_gradients(model: nn.Module, expected: dict[str, Tensor], names: Any = None) -> None:
    """Compare the shards of sharded parameters, and replicated parameters in full."""
    for name, parameter in model.named_parameters():
        shard, wanted = shard_on(parameter, "wp"), expected[name]
        if names is not None and name not in names:
            wanted = None
        elif shard is not None:
            wanted = shard.local(wanted, dist.get_rank())
        with named(name):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-5)


def train() -> None:
    """Train steps in which the order is recorded, weights are prefetched, and buffers are reused."""
    for overlap in (True, False):
        model = make_parallel(overlap=overlap)
        size, rank = dist.get_world_size(), dist.get_rank()
        for block in list(model)[:-1]:
            rows = block.linear.weight.shape[0]
            assert rows == -(-shard_on(block.linear.weight, "wp").blocks[0] // size)
        for step in range(3):
            x, plain_x = (numbers(B, S, WIDTHS[0], seed=rank).requires_grad_() for _ in range(2))
            out, plain_out = model(x), make_model()(plain_x)
            torch.testing.assert_close(out, plain_out, rtol=1e-6, atol=1e-6)
            for output in (out, plain_out):
                (output * numbers(B, S, 4, seed=9)).sum().backward()
            torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-5)
            require_gradients(model, mean_gradients(model, step + 1))


@pytest.mark.parametrize("ranks", [2, *slow(3, 4)])
def test_layers_compute_what_plain_ones_do(pool: Pool, ranks: int) -> None:
    pool.run(ranks, train)


def check_ways() -> None:
    """Test other kinds of backwards, each twice, so that the second is prefetched; tests/contract has more."""
    for number in range(2):
        for way in (with_frozen, of_inputs_alone, evaluated_between):
            with named(f"{way.__name__}, run {number}"):
                way()


def with_frozen() -> None:
    model = make_parallel()
    model[0].requires_grad_(False)
    model[1].linear.weight.requires_grad_(False)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for step in range(3):
        loss_of(model, dist.get_rank()).backward()
        require_gradients(model, mean_gradients(model, step + 1), trained)


def of_inputs_alone() -> None:
    """Weight gradients that are not requested neither stay in memory nor enter the next backward."""
    model = make_parallel()
    for _ in range(2):
        loss_of(model, dist.get_rank()).backward()
    model.zero_grad()
    for _ in range(3):
        x = numbers(B, S, WIDTHS[0], seed=dist.get_rank()).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
    loss_of(model, dist.get_rank()).backward()
    require_gradients(model, mean_gradients(model))


def evaluated_between() -> None:
    """Updated weights are used instead of prefetched ones; a forward that ends early leaves no wait behind."""
    model = make_parallel()
    for _ in range(2):
        loss_of(model, dist.get_rank()).backward()
        model.zero_grad()
    with torch.no_grad():
        model[:2](numbers(B, S, WIDTHS[0]))  # the third layer's weight is in flight now
        for parameter in model.parameters():
            parameter.mul_(2)
        doubled = make_model()
        for parameter in doubled.parameters():
            parameter.mul_(2)
        x = numbers(B, S, WIDTHS[2])
        torch.testing.assert_close(model[2:](x), doubled[2:](x), rtol=1e-6, atol=1e-6)


def test_backwards_of_all_kinds_give_the_same(pool: Pool) -> None:
    pool.run(2, check_ways)


def transfers(ahead: bool) -> str:
    """Return the all-gathers and reduce-scatters of the third step in order, for the first three layers."""
    model = make_parallel(overlap=ahead)
    model, size = nn.Sequential(*list(model)[:3]), dist.get_world_size()
    numbers_of = {block.linear.weight.numel() * size: index for index, block in enumerate(model)}
    log: list[str] = []

    def logged(begin: Any, what: str, position: int) -> Any:
        def begun(*args: Any) -> Any:
            name = f"{what}{numbers_of[args[position].numel()]}"
            work = begin(*args)
            log.append(f"begin {name}")
            return SimpleNamespace(wait=lambda: (log.append(f"wait {name}"), work.wait()))

        return begun

    names = {"begin_all_gather": ("w", 0), "begin_reduce_scatter": ("g", 1)}
    begins = {name: logged(getattr(gathered_linear, name), *what) for name, what in names.items()}
    for step in range(3):
        with patch.multiple(gathered_linear, **begins) if step == 2 else nullcontext():
            model(numbers(B, S, WIDTHS[0]).requires_grad_()).sum().backward()
    return ", ".join(log)


AHEAD = (
    "begin w0, wait w0, begin w1, wait w1, begin w2, wait w2, begin w2, wait w2, begin w1, begin g2, wait w1, "
    "begin w0, begin g1, wait g2, wait w0, begin g0, wait g0, wait g1"
)
PLAIN = (
    "begin w0, wait w0, begin w1, wait w1, begin w2, wait w2, begin w2, wait w2, begin g2, wait g2, begin w1, wait w1, "
    "begin g1, wait g1, begin w0, wait w0, begin g0, wait g0"
)


@pytest.mark.parametrize(("ahead", "expected"), [(True, AHEAD), (False, PLAIN)])
def test_weights_are_gathered_one_layer_ahead_and_gradients_waited_for_one_layer_later(
    pool: Pool, ahead: bool, expected: str
) -> None:
    assert pool.run(2, transfers, ahead) == [expected] * 2


def count() -> tuple[dict[Any, Any], int]:
    """Return the traffic of a step on the weight axis, and the number of elements of all sharded weights."""
    mesh = ParallelMesh(wp=dist.get_world_size())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8))
    apply_weight_sharding(model, list(model)[:-1], mesh.group("wp"))
    for _ in range(3):
        with Traffic(mesh) as traffic:
            model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    return {key: (count.calls, count.sent) for key, count in traffic.counts.items()}, 3 * 64 * 64


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_a_step_moves_every_weight_three_times(pool: Pool, ranks: int) -> None:
    for counts, elements in pool.run(ranks, count):
        share = 4 * elements * (ranks - 1) / ranks
        assert counts == {("wp", "all_gather"): (6, 2 * share), ("wp", "reduce_scatter"): (3, share)}


def test_models_without_plain_linear_layers_are_refused() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(2, 2), nn.LayerNorm(2))
    (error,) = weight_model_errors(model, [model[0]])
    assert "there are none in the model's 1 layers (of Own)" in error
    model = make_model()
    assert weight_model_errors(model, list(model)) == []
    model[0].linear.register_forward_hook(lambda *_: None)
    (error,) = weight_model_errors(model, list(model))
    assert error.startswith("0.linear has hooks")


def with_computed_weight() -> None:
    model = make_model()
    nn.utils.spectral_norm(model[0].linear)
    assert weight_model_errors(model, list(model)) == []
    apply_weight_sharding(model, list(model), dist.group.WORLD)
    assert type(model[0].linear) is nn.Linear and type(model[1].linear) is ShardedLinear


def test_layers_whose_weight_is_computed_stay_replicated(pool: Pool) -> None:
    pool.run(2, with_computed_weight)


def split_tied() -> None:
    """A weight of two layers is sharded once; one that is tied to an embedding stays replicated."""
    model = nn.ModuleDict(
        dict(embedding=nn.Embedding(4, 4), layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    )
    embedding, layers = model["embedding"], model["layers"]
    layers[1].weight = layers[0].weight
    layers[2].weight = embedding.weight
    plain = deepcopy(model)
    apply_weight_sharding(model, list(layers), dist.group.WORLD)
    assert [type(layer) is nn.Linear for layer in layers] == [False, False, True]
    assert layers[0].weight is layers[1].weight and layers[0].weight.shape == (2, 4)
    assert layers[2].weight is embedding.weight and embedding.weight.shape == (4, 4)
    for module in (plain, model):
        x = module["embedding"](torch.arange(4))
        for layer in module["layers"]:
            x = layer(x).tanh()
        x.square().sum().backward()
    expected = plain["layers"][0].weight.grad.chunk(2)[dist.get_rank()]
    torch.testing.assert_close(layers[0].weight.grad, expected)


def test_tied_weights_are_sharded_once_or_stay_replicated(pool: Pool) -> None:
    pool.run(2, split_tied)


def use(name: str) -> Use:
    """Parse a use of a layer: in a forward, in a backward (upper case), or recomputed there (prefix r)."""
    kind = "again" if len(name) > 1 else "backward" if name.isupper() else "forward"
    return Use(kind, name[-1].lower())


@pytest.mark.parametrize(
    ("before", "uses", "prefetched"),
    [
        ("", "a b c C B A", "- - - - - -"),
        ("a b c C B A", "a b c C B A", "b c - b a -"),  # nothing follows the last use of a pass
        ("a b a b B A", "a b a b B A B A", "b - b - a - a -"),  # a second forward may follow the first
        ("a b c C B A", "a c C A", "b - b -"),
        ("a b c C B A a c C A", "a b c C B A", "- c - - a -"),  # never again after one error
        ("a ra A", "a ra A", "- a -"),  # a recomputed layer belongs to the backward
    ],
)
def test_a_layer_that_always_followed_is_prefetched(before: str, uses: str, prefetched: str) -> None:
    order, prefetches = PrefetchOrder(), []
    for event in before.split():
        order.record(use(event))
    for event in uses.split():
        order.record(use(event))
        after = order.after(use(event))
        prefetches.append("-" if after is None else after.layer)
    assert " ".join(prefetches) == prefetched
