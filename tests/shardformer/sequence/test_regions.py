"""Sequences that are spread between regions: layers against the native ones."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.pipeline.split_backward import WeightGradients, hold_weight_gradients
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


@pytest.mark.parametrize(("style", "overlap"), STYLES)
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [(2, (13,)), pytest.param(3, (3, 13), marks=pytest.mark.slow), (4, (5,))],
)
def test_a_layer_on_parts_of_a_sequence_computes_what_the_whole_one_does(
    pool: Pool, ranks: int, lengths: tuple[int, ...], style: Any, overlap: bool
) -> None:
    pool.run(ranks, layers, style, overlap, lengths)


def further_layers(style: Any, overlap: bool) -> None:
    for name in FURTHER:
        with named(name):
            require_same(name, world_sequence(style, overlap=overlap), 13)


@pytest.mark.parametrize(("style", "overlap"), STYLES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_that_flatten_or_hold_what_is_not_spread(
    pool: Pool, ranks: int, style: Any, overlap: bool
) -> None:
    pool.run(ranks, further_layers, style, overlap)


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


@pytest.mark.parametrize(("style", "overlap"), STYLES)
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


def no_sum(rows: Tensor, group: dist.ProcessGroup) -> Any:
    return lambda: rows[group.rank()].contiguous()


def of_the_rank_before(away: Tensor, arriving: Tensor, group: dist.ProcessGroup) -> Any:
    return lambda: arriving.copy_(away)


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
