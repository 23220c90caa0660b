"""Sequences that are spread between regions: layers against the native ones."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.pipeline.linear import hold_weight_gradients
from echelon.pipeline.split_backward import WeightGradients
from echelon.shardformer import layer_split
from echelon.shardformer.layer import entry
from echelon.shardformer.sequence import regather, regions, ring_products

from ...pool import Pool
from ..compare import named
from .layers import FURTHER, LAYERS, require_same, world_sequence

STYLES = [("gather", False), ("gather", True), ("regather", False), ("regather", True), ("ring", False)]


def layers(style: Any, overlap: bool, lengths: tuple[int, ...]) -> None:
    for name in LAYERS:
        for length in lengths:
            with named(f"{name} of length {length}"):
                require_same(name, world_sequence(style, overlap=overlap), length)


def rows(*ranks: tuple[int, Any], quick: tuple[tuple[int, Any], ...]) -> list[Any]:
    """Every style on these numbers of ranks, most of them slow; with what else is given beside the ranks."""
    return [
        pytest.param(
            number,
            given,
            style,
            overlap,
            marks=() if (number, style) in quick or (number, (style, overlap)) in quick else pytest.mark.slow,
        )
        for number, given in ranks
        for style, overlap in STYLES
    ]


@pytest.mark.parametrize(
    ("ranks", "lengths", "style", "overlap"),
    rows(
        (2, (13,)),
        (3, (3, 13)),
        (4, (3, 12, 13)),
        quick=((2, "gather"), (2, "regather"), (2, "ring"), (3, "ring")),
    ),
)
def test_a_layer_on_parts_of_a_sequence_computes_what_the_whole_one_does(
    pool: Pool, ranks: int, lengths: tuple[int, ...], style: Any, overlap: bool
) -> None:
    pool.run(ranks, layers, style, overlap, lengths)


def further_layers(style: Any, overlap: bool, names: tuple[str, ...]) -> None:
    for name in names:
        with named(name):
            require_same(name, world_sequence(style, overlap=overlap), 13)


@pytest.mark.parametrize(
    ("ranks", "names", "style", "overlap"),
    rows((2, tuple(FURTHER)), (4, tuple(FURTHER)), quick=((2, ("gather", False)), (2, "ring"))),
)
def test_layers_that_flatten_or_hold_what_is_not_spread(
    pool: Pool, ranks: int, names: tuple[str, ...], style: Any, overlap: bool
) -> None:
    pool.run(ranks, further_layers, style, overlap, names)


def recomputed(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    return checkpoint(layer, x, use_reentrant=False, **inputs)


def held_back(layer: nn.Module, loss: Tensor) -> None:
    """As the zero-bubble schedules go backward."""
    store = layer.get_submodule("mlp.up_proj").weight_gradients
    assert isinstance(store, WeightGradients)
    with store.holding((0, 0)):
        loss.backward()
    waiting = {name for name, parameter in layer.named_parameters() if parameter.grad is None}
    assert {"self_attn.o_proj.weight", "mlp.up_proj.weight"} <= waiting
    store.compute((0, 0))


def in_two_parts(style: Any, overlap: bool) -> None:
    require_same("llama", world_sequence(style, overlap=overlap), 13, run=recomputed)
    require_same("llama", world_sequence(style, overlap=overlap), 13, run=holding, backward=held_back)


def holding(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    hold_weight_gradients(layer)
    return layer(x, **inputs)


@pytest.mark.parametrize(("style", "overlap"), [("gather", False), ("regather", True), ("ring", False)])
def test_backward_may_compute_forward_again_and_weight_gradients_later(
    pool: Pool, style: Any, overlap: bool
) -> None:
    pool.run(2, in_two_parts, style, overlap)


def doubled(layer: nn.Module) -> None:
    """Let the first layer of the MLP be given something else than what entered the region."""
    layer.get_submodule("mlp.gate_proj").register_forward_pre_hook(lambda module, args: (2 * args[0],))


def written(layer: nn.Module) -> None:
    """Let the region write to what entered it."""
    layer.get_submodule("mlp.gate_proj").register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))


def changed_inputs() -> None:
    for style in ("gather", "regather", "ring"):
        for change in (doubled, written):
            with named(f"{style}, {change.__name__}"):
                layer = require_same("llama", world_sequence(style), 13, change=change)
                assert not layer.get_submodule("mlp.gate_proj").takes_entered or style == "gather"
                require_same("llama", world_sequence(style), 13, run=twice, change=change)


def twice(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    """The second time it is known that the layer does not take what enters the region."""
    with torch.no_grad():
        first = layer(x, **inputs)
    torch.testing.assert_close(layer(x, **inputs), first)
    return layer(x, **inputs)


def test_a_region_may_change_what_entered_it_before_it_multiplies(pool: Pool) -> None:
    pool.run(2, changed_inputs)


def without_bias(layer: nn.Module) -> None:
    """Let the first layer of the MLP leave its bias to what follows, as compiled code has it do."""
    widening, activation = layer.get_submodule("intermediate.dense"), layer.get_submodule("intermediate")
    bias = widening.bias
    widening.register_forward_pre_hook(lambda module, args: module.register_parameter("bias", None))
    widening.register_forward_hook(lambda module, args, output: module.register_parameter("bias", bias))
    activation.intermediate_act_fn = _Biased(widening, activation.intermediate_act_fn)


class _Biased(nn.Module):
    def __init__(self, linear: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        vars(self)["linear"] = linear

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = vars(self)["linear"].bias
        output: Tensor = self.activation(x + bias)
        return output


def left_bias() -> None:
    require_same("bert", world_sequence("ring"), 13, change=without_bias)


def test_a_product_computed_early_has_no_bias_that_is_added_later(pool: Pool) -> None:
    pool.run(2, left_bias)


def no_sum(rows: Tensor, group: dist.ProcessGroup) -> Any:
    return lambda: rows[group.rank()].contiguous()


def of_the_rank_before(x: Tensor, group: dist.ProcessGroup) -> Any:
    return lambda: x.clone()


def from_its_end(self: Any, kept: Tensor) -> Tensor:
    whole: Tensor = self._sequence.begin_whole(kept, self._length)()
    return whole.flip(1).flatten(0, 1)


def others_twice(part: Tensor, sequence: Any, length: int) -> Any:
    for start, stretch in ROUND(part, sequence, length):
        yield start, stretch if start == sequence.axis.rank * part.shape[1] else 2 * stretch


ROUND = ring_products._own_first
MUTATIONS: dict[str, tuple[Any, Any, Any, tuple[Any, bool]]] = {
    "no sum at a region's end": (regions, "begin_sum_of_rows", no_sum, ("gather", False)),
    "whole gradients of norms": (layer_split, "parameters_of_parts", lambda *_: [], ("gather", False)),
    "rows of another order": (regather.Regather, "rows", from_its_end, ("regather", False)),
    "nothing arrives round the ring": (ring_products, "begin_step", of_the_rank_before, ("ring", False)),
    "other parts' gradients twice": (ring_products, "_own_first", others_twice, ("gather", True)),
}


def mutated(name: str) -> None:
    owner, attribute, other, (style, overlap) = MUTATIONS[name]
    with patch.object(owner, attribute, other):
        layers(style, overlap, (13,))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_put_in_is_found(pool: Pool, name: str) -> None:
    with pytest.raises(AssertionError, match="of length 13"):
        pool.run(2, mutated, name)


def stale(style: Any) -> None:
    with patch.object(entry._Given, "is_about", lambda self, x: True):
        require_same("llama", world_sequence(style), 13, change=doubled)


@pytest.mark.parametrize("style", ["regather", "ring"])
def test_taking_another_tensor_for_what_entered_is_found(pool: Pool, style: Any) -> None:
    with pytest.raises(AssertionError):
        pool.run(2, stale, style)
