"""Linear layers alone, split over 2 and 4 ranks, against the whole layer."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon.cluster.placement import Shard
from echelon.shardformer.layers import (
    FusedLinear1D_Col,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)

from ..pool import Pool
from .compare import named, numbers, require_equal_on_ranks, require_same_gradients

B, S, INPUTS, OUTPUTS = 2, 5, 16, 24


def linear(*, bias: bool) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(INPUTS, OUTPUTS, bias=bias)


def conv1d() -> Conv1D:
    torch.manual_seed(3)
    layer = Conv1D(OUTPUTS, INPUTS)
    layer.bias.data.normal_()
    return layer


def own(shard: Shard, whole: Tensor) -> Tensor:
    return shard.local(whole, dist.get_rank())


def check_column(native: nn.Module, target: Any, shard: Shard, **kwargs: Any) -> None:
    """Outputs and all gradients, where every rank weighs its own outputs."""
    layer = target.from_native_module(deepcopy(native), dist.group.WORLD, **kwargs)
    x, weights = numbers(B, S, INPUTS), numbers(B, S, OUTPUTS, seed=2)
    whole_x, split_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = native(whole_x)
    outputs = layer(split_x)
    if kwargs.get("gather_output"):
        torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-6)
        (outputs * weights).sum().backward()
    else:
        torch.testing.assert_close(outputs, own(shard, expected), rtol=1e-6, atol=1e-6)
        # What several ranks hold is used on each of them in part: here in equal parts.
        (outputs * own(shard, weights) / shard.copies).sum().backward()
    (expected * weights).sum().backward()
    assert split_x.grad is not None
    torch.testing.assert_close(split_x.grad, whole_x.grad, rtol=1e-5, atol=1e-5)
    require_same_gradients(layer, native)


def columns() -> None:
    size = dist.get_world_size()
    plain = Shard(size=size, dim=-1, blocks=(OUTPUTS,))
    fused = Shard(size=size, dim=-1, blocks=(8, 4, 12))
    copied = Shard(size=size, dim=-1, blocks=(OUTPUTS,), copies=2)
    for bias in (True, False):
        with named(f"bias={bias}"):
            check_column(linear(bias=bias), Linear1D_Col, plain)
            check_column(linear(bias=bias), Linear1D_Col, plain, gather_output=True)
            check_column(linear(bias=bias), Linear1D_Col, copied, copies=2)
            check_column(linear(bias=bias), FusedLinear1D_Col, fused, split_sizes=(8, 4, 12))
    with named("Conv1D"):
        check_column(conv1d(), GPT2FusedLinearConv1D_Col, plain)
        check_column(conv1d(), GPT2FusedLinearConv1D_Col, plain, gather_output=True)
        check_column(conv1d(), GPT2FusedLinearConv1D_Col, fused, split_sizes=[8, 4, 12])


def check_row(native: nn.Module, target: Any) -> None:
    layer = target.from_native_module(deepcopy(native), dist.group.WORLD)
    shard = Shard(size=dist.get_world_size(), dim=-1, blocks=(INPUTS,))
    x, weights = numbers(B, S, INPUTS), numbers(B, S, OUTPUTS, seed=2)
    whole_x, split_x = x.clone().requires_grad_(), own(shard, x).requires_grad_()
    expected = native(whole_x)
    outputs = layer(split_x)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    require_equal_on_ranks(outputs, "the output")
    (expected * weights).sum().backward()
    (outputs * weights).sum().backward()
    assert whole_x.grad is not None
    torch.testing.assert_close(split_x.grad, own(shard, whole_x.grad), rtol=1e-5, atol=1e-5)
    require_same_gradients(layer, native)


def rows() -> None:
    check_row(linear(bias=True), Linear1D_Row)
    check_row(linear(bias=False), Linear1D_Row)
    check_row(conv1d(), GPT2FusedLinearConv1D_Row)


def no_input_gradient() -> Tensor | None:
    """The gradient that `reduce_input_gradient=False` leaves to the region: this rank's part."""
    layer = Linear1D_Col(linear(bias=True), dist.group.WORLD, reduce_input_gradient=False)
    x = numbers(B, S, INPUTS).requires_grad_()
    layer(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_column_split_layer_computes_its_outputs_and_the_whole_gradients(pool: Pool, ranks: int) -> None:
    pool.run(ranks, columns)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_split_layer_computes_whole_outputs_and_adds_its_bias_once(pool: Pool, ranks: int) -> None:
    pool.run(ranks, rows)


def test_inside_a_region_a_column_leaves_the_gradient_of_its_input_in_parts(pool: Pool) -> None:
    parts = pool.run(2, no_input_gradient)
    assert not torch.equal(parts[0], parts[1])
    expected = linear(bias=True).weight.sum(0).expand(B, S, INPUTS)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-5, atol=1e-5)


class Scaled(nn.Linear):
    """A linear layer with something of its own, as an adapter or a quantized layer is."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Group:
    """Stands for a process group of one rank of two, where nothing communicates."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def hooked() -> nn.Linear:
    layer = linear(bias=True)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


def patched() -> nn.Linear:
    layer = linear(bias=True)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def quantized() -> nn.Linear:
    layer = linear(bias=False)
    layer.weight = nn.Parameter(torch.zeros(OUTPUTS, INPUTS, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("native", "message"),
    [
        (Scaled(INPUTS, OUTPUTS), r"Scaled and not a plain torch\.nn\.modules\.linear\.Linear"),
        (conv1d(), "Conv1D and not a plain"),
        (nn.utils.parametrizations.weight_norm(linear(bias=True)), "ParametrizedLinear and not a plain"),
        (hooked(), "has hooks or a forward of its own"),
        (patched(), "has hooks or a forward of its own"),
        (quantized(), "weight of Parameter in torch.int8"),
    ],
)
@pytest.mark.parametrize("target", [Linear1D_Col, Linear1D_Row])
def test_a_layer_that_does_more_than_its_weight_is_not_replaced(
    target: Any, native: nn.Module, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        target.from_native_module(native, Group())


def test_a_linear_layer_is_not_taken_for_a_conv1d() -> None:
    with pytest.raises(TypeError, match=r"Linear and not a plain transformers\.pytorch_utils\.Conv1D"):
        GPT2FusedLinearConv1D_Col.from_native_module(linear(bias=True), Group())  # type: ignore[arg-type]


def test_outputs_that_cannot_be_gathered_are_refused() -> None:
    for kwargs in ({"copies": 2}, {"split_sizes": (8, 16)}):
        with pytest.raises(ValueError, match="one block without copies"):
            Linear1D_Col(linear(bias=True), Group(), gather_output=True, **kwargs)  # type: ignore[arg-type]


def test_an_output_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="7 entries along dim 0 are not divisible by 2 ranks"):
        Linear1D_Col.from_native_module(nn.Linear(4, 7), Group())  # type: ignore[arg-type]


def test_the_layers_are_found_under_colossalai_s_name_too() -> None:
    from echelon.shardformer import layer, layers

    assert {name: getattr(layer, name) for name in layers.__all__} == {
        name: getattr(layers, name) for name in layers.__all__
    }
