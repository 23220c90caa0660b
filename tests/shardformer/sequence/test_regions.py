"""Sequences that are sharded between regions: layers against the native ones."""

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.cluster.collectives import InFlight
from echelon.pipeline.weight_gradients import WeightGradients
from echelon.shardformer import layer_split
from echelon.shardformer.layers import linear, split_gather
from echelon.shardformer.layers.weight_gradient import defer_weight_gradients

from ...pool import Pool
from ..compare import named
from .layers import FURTHER, LAYERS, require_same, world_sequence

STYLES = [("gather", False), ("gather", True), ("regather", False), ("regather", True)]


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
        quick=((2, "gather"), (2, "regather"), (3, "regather")),
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
    rows((2, tuple(FURTHER)), (4, tuple(FURTHER)), quick=((2, ("gather", False)), (2, ("regather", True)))),
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
    with store.deferring((0, 0)):
        loss.backward()
    waiting = {name for name, parameter in layer.named_parameters() if parameter.grad is None}
    assert {"self_attn.o_proj.weight", "mlp.up_proj.weight"} <= waiting
    store.compute((0, 0))


def in_two_parts(style: Any, overlap: bool) -> None:
    require_same("llama", world_sequence(style, overlap=overlap), 13, run=recomputed)
    require_same("llama", world_sequence(style, overlap=overlap), 13, run=holding, backward=held_back)


def holding(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    defer_weight_gradients(layer)
    return layer(x, **inputs)


@pytest.mark.parametrize(("style", "overlap"), [("gather", False), ("regather", True)])
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
    for style in ("gather", "regather"):
        for change in (doubled, written):
            with named(f"{style}, {change.__name__}"):
                require_same("llama", world_sequence(style), 13, change=change)


def test_a_region_may_change_what_entered_it_before_it_multiplies(pool: Pool) -> None:
    pool.run(2, changed_inputs)


def no_sum(rows: Tensor, group: dist.ProcessGroup) -> Any:
    return InFlight(None, rows[group.rank()].contiguous())


def from_its_end(self: Any, kept: Tensor) -> Tensor:
    whole: Tensor = self._sequence.begin_whole(kept, self._length).wait()
    return whole.flip(1).flatten(0, 1)


def without_others(x: Tensor, weight: Tensor) -> Tensor:
    """The product with the gradients of the other rank's part of 13 positions is zeros."""
    product: Tensor = nn.functional.linear(x, weight)
    return 0 * product if x.shape[1] == (6, 7)[dist.get_rank()] else product


MUTATIONS: dict[str, tuple[Any, Any, Any, tuple[Any, bool]]] = {
    "no sum at a region's end": (split_gather, "begin_sum_of_rows", no_sum, ("gather", False)),
    "whole gradients of norms": (layer_split, "parameters_of_parts", lambda *_: [], ("gather", False)),
    "rows of another order": (split_gather.Regather, "rows", from_its_end, ("regather", False)),
    "nothing of the other parts": (split_gather, "linear", without_others, ("gather", True)),
}


def mutated(name: str) -> None:
    owner, attribute, other, (style, overlap) = MUTATIONS[name]
    with patch.object(owner, attribute, other):
        layers(style, overlap, (13,))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_put_in_is_found(pool: Pool, name: str) -> None:
    with pytest.raises(AssertionError, match="of length 13"):
        pool.run(2, mutated, name)


def stale() -> None:
    """A layer takes any tensor for the one that entered the region."""
    with patch.object(linear._Kept, "is_of", lambda self, x: True):
        require_same("llama", world_sequence("regather"), 13, change=doubled)


def test_taking_another_tensor_for_what_entered_is_found(pool: Pool) -> None:
    with pytest.raises(AssertionError):
        pool.run(2, stale)
