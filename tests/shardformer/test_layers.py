"""Single parallel layers on every rank of a tensor axis, compared with the native layers."""

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D

from echelon.cluster.collectives import InFlight
from echelon.cluster.placement import Shard, shard_on
from echelon.shardformer import layers
from echelon.shardformer.layers import (
    FusedLinear1D_Col,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from echelon.shardformer.layers import linear as split_layers
from echelon.shardformer.layers.embedding import embedding_errors, is_scaled, vocab_range, vocab_shard
from echelon.shardformer.layers.linear import enter
from echelon.shardformer.layers.norm import SplitRMSNorm, norm_errors
from echelon.shardformer.sharder import StandInGroup

from ..pool import Pool
from ..slow import slow
from .compare import named, numbers, pieces, require_equal_on_ranks, require_same_gradients

B, S, INPUTS, OUTPUTS = 2, 5, 16, 24
ALONE: Any = StandInGroup(0, 2)  # for tests without communication


def compare(
    native: nn.Module, target: Any, x: Tensor, cut_in: Any = None, cut_out: Any = None, **arguments: Any
) -> None:
    """Require the outputs and all gradients of the native layer.

    Args:
        native: the whole layer.
        target: the class of the parallel one.
        x: whole inputs, equal on all ranks.
        cut_in: how inputs are sharded; None is not at all.
        cut_out: how outputs are.
        arguments: of the parallel layer.
    """
    rank, layer = dist.get_rank(), target.from_native_module(deepcopy(native), dist.group.WORLD, **arguments)

    def local(tensor: Tensor, cut: Shard | None) -> Tensor:
        return tensor.detach().clone() if cut is None else cut.local(tensor.detach(), rank)

    full_x, local_x = x.clone(), local(x, cut_in)
    for tensor in (full_x, local_x):
        tensor.requires_grad_(x.is_floating_point())
    expected, output = native(full_x), layer(local_x)
    torch.testing.assert_close(output, local(expected, cut_out), rtol=1e-5, atol=1e-5)
    if cut_out is None:
        require_equal_on_ranks(output, "the output")
    weights = numbers(*expected.shape, seed=2)
    # Replicas on several ranks have partial gradients: here in equal parts.
    (output * local(weights, cut_out) / (1 if cut_out is None else cut_out.replicas)).sum().backward()
    (expected * weights).sum().backward()
    if local_x.grad is not None:
        replicas = 1 if cut_in is None else cut_in.replicas
        first = rank - rank % replicas
        full_gradient = sum(pieces(local_x.grad)[first : first + replicas])
        torch.testing.assert_close(full_gradient, local(full_x.grad, cut_in), rtol=1e-5, atol=1e-5)
    require_same_gradients(layer, native)


def drawn(layer: nn.Module) -> Any:
    """Return the layer with random parameters, equal on all ranks."""
    torch.manual_seed(3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def linear_layers() -> None:
    size, x = dist.get_world_size(), numbers(B, S, INPUTS)
    inputs, outputs = (Shard(size=size, dim=-1, blocks=(width,)) for width in (INPUTS, OUTPUTS))
    fused, copied = replace(outputs, blocks=(8, 4, 12)), replace(outputs, replicas=2)
    kinds = [
        (nn.Linear(INPUTS, OUTPUTS), Linear1D_Col, FusedLinear1D_Col, Linear1D_Row),
        (nn.Linear(INPUTS, OUTPUTS, bias=False), Linear1D_Col, FusedLinear1D_Col, Linear1D_Row),
        (Conv1D(OUTPUTS, INPUTS), *[GPT2FusedLinearConv1D_Col] * 2, GPT2FusedLinearConv1D_Row),
    ]
    for native, column, fused_column, row in kinds:
        with named(f"{native}"):
            for target, cuts, arguments in (
                (column, (None, outputs), {}),
                (column, (None, None), {"gather_output": True}),
                (column, (None, copied), {"replicas": 2}),
                (fused_column, (None, fused), {"split_sizes": [8, 4, 12]}),
                (row, (inputs, None), {}),
                (row, (None, None), {"split_input": True}),
            ):
                compare(drawn(deepcopy(native)), target, x, *cuts, **arguments)


def embeddings() -> None:
    size = dist.get_world_size()
    for entries, multiple in ((24, 1), (23, 1), (23, 4), (101, 8), (5, 64), (1, 1)):
        width = sum(vocab_shard(entries, size, multiple).padded or ()) // size
        # No padding, and one on the first and the last entry of each rank.
        borders = {width * rank for rank in range(size)} | {width * (rank + 1) - 1 for rank in range(size)}
        ids = torch.cat([torch.arange(entries), torch.arange(entries - 1, -1, -1)]).view(2, -1)
        for padding in (None, entries - 1, *(sorted(border for border in borders if border < entries))):
            with named(f"{entries} entries, multiple {multiple}, padding {padding}"):
                native = drawn(nn.Embedding(entries, 6, padding_idx=padding))
                compare(native, VocabParallelEmbedding1D, ids, make_vocab_size_divisible_by=multiple)


def heads() -> None:
    for (entries, multiple), bias in product(((24, 1), (23, 1), (101, 8), (5, 64)), (True, False)):
        with named(f"{entries} entries, multiple {multiple}, bias={bias}"):
            native = drawn(nn.Linear(6, entries, bias=bias))
            arguments = {"make_vocab_size_divisible_by": multiple}
            compare(native, VocabParallelLMHead1D, numbers(2, 3, 6), **arguments)
            layer = VocabParallelLMHead1D(deepcopy(native), dist.group.WORLD, **arguments)
            layer.gather_output, x = False, numbers(2, 3, 6)
            local, held = layer(x), layer.range
            expected = native(x)[..., held.first : held.first + held.valid]
            torch.testing.assert_close(local[..., : held.valid], expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.gathered(local), native(x), rtol=1e-5, atol=1e-5)


def test_a_copy_of_a_layer_has_no_state_of_a_pending_call() -> None:
    group: Any = StandInGroup(0, 2)
    layer = Linear1D_Col(nn.Linear(4, 4), group)
    enter([torch.ones(1, 4, requires_grad=True)], group, [layer])
    assert layer.later_product is not None
    assert deepcopy(layer).later_product is None


def test_a_weight_that_two_layers_of_a_region_share_has_the_gradients_of_both() -> None:
    first = Linear1D_Col(nn.Linear(4, 4, bias=False), ALONE, reduce_input_gradient=False)
    second = deepcopy(first)
    second.weight = first.weight
    leaf = torch.randn(3, 4, requires_grad=True)
    with patch.object(split_layers, "begin_all_reduce", lambda gradient, group: InFlight(None, gradient)):
        (x,) = enter([leaf * 1], ALONE, [first, second])
        (first(x).square().sum() + second(x).sum()).backward()
    product = nn.functional.linear(leaf, first.weight)
    expected = torch.autograd.grad(product.square().sum() + product.sum(), [leaf, first.weight])
    torch.testing.assert_close((leaf.grad, first.weight.grad), expected)


def tied() -> None:
    """Head and embedding share one weight: it is sharded once, and its gradient is the sum of both uses."""
    reference = nn.Sequential(drawn(nn.Embedding(23, 6, padding_idx=3)), nn.Linear(6, 23, bias=False))
    reference[1].weight = reference[0].weight
    parallel = deepcopy(reference)
    for index, target in enumerate((VocabParallelEmbedding1D, VocabParallelLMHead1D)):
        parallel[index] = target(parallel[index], dist.group.WORLD, make_vocab_size_divisible_by=4)
    assert parallel[0].weight is parallel[1].weight
    assert shard_on(parallel[0].weight, "tp") == vocab_shard(23, dist.get_world_size(), 4)
    ids, weights = torch.arange(23).view(1, -1), numbers(1, 23, 23)
    for model in (reference, parallel):
        (model(ids) * weights).sum().backward()
    require_same_gradients(parallel, reference)


def norms() -> None:
    size = dist.get_world_size()
    # Features, padded features, and neighbouring ranks with the same shard.
    for features, padded, replicas in ((16, 16, 1), (24, 32, 1), (16, 16, 2), (12, 16, 2)):
        cut: dict[str, Any] = {"replicas": replicas, "padded": None if padded == features else (padded,)}
        shard = Shard(size=size, dim=2, blocks=(features,), **cut)
        native = drawn(Olmo2RMSNorm(features, eps=1e-3))
        with named(shard):
            arguments = {"padded_sizes": shard.padded, "replicas": replicas}
            compare(native, SplitRMSNorm, numbers(2, 3, features), shard, shard, **arguments)


@pytest.mark.parametrize("function", [linear_layers, embeddings, heads, tied, norms])
@pytest.mark.parametrize("ranks", [*slow(2), 4])
def test_a_parallel_layer_computes_what_the_native_one_does(pool: Pool, ranks: int, function: Any) -> None:
    pool.run(ranks, function)


def no_input_gradient() -> Tensor | None:
    """With `reduce_input_gradient=False` the input's gradient is partial: the region sums it."""
    layer = Linear1D_Col(drawn(nn.Linear(INPUTS, OUTPUTS)), dist.group.WORLD, reduce_input_gradient=False)
    x = numbers(B, S, INPUTS).requires_grad_()
    layer(x).sum().backward()
    return x.grad


def test_inside_a_region_the_input_gradient_of_a_column_layer_is_partial(pool: Pool) -> None:
    partial_gradients = pool.run(2, no_input_gradient)
    assert not torch.equal(*partial_gradients)
    expected = drawn(nn.Linear(INPUTS, OUTPUTS)).weight.sum(0).expand(B, S, INPUTS)
    torch.testing.assert_close(sum(partial_gradients), expected, rtol=1e-5, atol=1e-5)


def look_up(ids: list[int], trained: bool = True) -> Tensor:
    native = drawn(nn.Embedding(10, 6))
    layer = VocabParallelEmbedding1D(native, dist.group.WORLD, make_vocab_size_divisible_by=8)
    layer.weight.requires_grad_(trained)
    return layer(torch.tensor([ids])).detach()


def test_a_frozen_embedding_looks_up_the_same(pool: Pool) -> None:
    expected = drawn(nn.Embedding(10, 6))(torch.tensor([[0, 9, 4]])).detach()
    for output in pool.run(2, look_up, [0, 9, 4], False):
        assert torch.equal(output, expected)


def test_every_entry_is_on_one_rank() -> None:
    for entries, ranks in product(range(1, 40), (1, 2, 3, 4)):
        shard = vocab_shard(entries, ranks, 4)
        held = [vocab_range(shard, rank) for rank in range(ranks)]
        local = [entry for one in held for entry in range(one.first, one.first + one.valid)]
        assert local == list(range(entries))


# Refusals.


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_and_embeddings_are_known_by_what_they_compute(device: str) -> None:
    with torch.device(device):
        for kind in (Olmo2RMSNorm, LlamaRMSNorm, nn.RMSNorm):
            assert norm_errors(kind(8, eps=1e-5)) == []
        native = Gemma3TextScaledWordEmbedding(5, 4, padding_idx=0, embed_scale=2.0)
    assert is_scaled(native)
    assert embedding_errors(native) == []


def test_the_layers_are_found_under_colossalai_s_name_too() -> None:
    from echelon.shardformer import layer

    assert all(getattr(layer, name) is getattr(layers, name) for name in layers.__all__)
