"""Dropout where each rank computes on a part of the sequence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.shardformer.layers.sequence_axis import CommonRandom, PartRandom

from ...pool import Pool
from ..compare import named, numbers, pieces, require_equal_on_ranks
from .layers import BATCH, HIDDEN, built, first_of, inputs_of, sequence_sharded, world_sequence

LENGTH = 16
DROPPING = {
    "bert": {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.5, "attn_pdrop": 0.5},
    "opt": {"dropout": 0.5},  # by a function, not by a module
    "albert": {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5},
}


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """The entries dropped inside, among hidden states."""
    dropped: list[Tensor] = []
    native = nn.functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        output = native(input, p, training, inplace)
        if p > 0 and input.shape[-1] == HIDDEN and input.dim() < 4:
            dropped.append((output == 0) & (input != 0))
        return output

    nn.functional.dropout = dropout
    try:
        yield dropped
    finally:
        nn.functional.dropout = native


def gradients(name: str, run: Callable[..., Any]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of a layer's parameters after a step, and what was dropped among hidden states."""
    made = built(name, **DROPPING[name])
    sequence = world_sequence("gather")
    layer = sequence_sharded(made, sequence)
    sequence.axis.length = LENGTH
    x = sequence.axis.own(numbers(BATCH, LENGTH, HIDDEN), 1).requires_grad_()
    torch.manual_seed(7)
    with noted() as dropped:
        first_of(run(layer, x, **inputs_of(name, made[2], LENGTH))).square().sum().backward()
    require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")
    return [parameter.grad for parameter in layer.parameters()], dropped


def called(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    return layer(x, **inputs)


def around_call(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    return checkpoint(layer, x, use_reentrant=False, **inputs)


def around_forward(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    """As transformers does it: hooks of the layer are not called again."""
    native = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(native, *args, use_reentrant=False, **kwargs)  # type: ignore[method-assign]
    try:
        return layer(x, **inputs)
    finally:
        layer.forward = native  # type: ignore[method-assign]


def parts_differ() -> None:
    for name in ("bert", "gpt2", "opt"):
        with named(name):
            _, dropped = gradients(name, called)
            assert len(dropped) == 2
            for mask in dropped:
                first, *others = pieces(mask.to(torch.uint8))
                assert all(not torch.equal(first, other) for other in others)


def wholes_are_equal() -> None:
    _, dropped = gradients("albert", called)
    (mask,) = dropped
    assert mask.shape[1] == LENGTH
    require_equal_on_ranks(mask.float(), "what is dropped")
    assert mask.any()


def drawn_again() -> None:
    for name in DROPPING:
        expected, _ = gradients(name, called)
        for run in (around_call, around_forward):
            with named(f"{name}, {run.__name__}"):
                found, _ = gradients(name, run)
                for one, other in zip(expected, found, strict=True):
                    assert one is None or (other is not None and torch.equal(one, other))


@pytest.mark.parametrize("function", [parts_differ, wholes_are_equal, drawn_again])
def test_what_is_dropped_differs_between_parts_alone_and_is_dropped_again(pool: Pool, function: Any) -> None:
    pool.run(2, function)


class SampleDropPath(nn.Module):
    """Drops whole samples, as models name such modules."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full((x.shape[0], 1, 1), 1 - self.drop_prob))


def samples() -> None:
    made = built("bert")
    made[0].get_submodule("output").dropout = SampleDropPath()
    sequence = world_sequence("gather")
    layer = sequence_sharded(made, sequence)
    sequence.axis.length = LENGTH
    kept: list[Tensor] = []
    layer.get_submodule("output.dropout").register_forward_hook(
        lambda module, args, output: kept.append(output.abs().amax((1, 2)) > 0)
    )
    x = sequence.axis.own(numbers(BATCH, LENGTH, HIDDEN), 1)
    for _ in range(8):
        layer(x, **inputs_of("bert", made[2], LENGTH))
    drawn = torch.stack(kept)
    require_equal_on_ranks(drawn.float(), "which samples are kept")
    assert drawn.any() and not drawn.all()


def test_whole_samples_are_dropped_on_all_ranks_alike(pool: Pool) -> None:
    pool.run(2, samples)


def unmarked(target: Any, function: Callable[[], None]) -> None:
    with patch.object(target, "from_native_module", staticmethod(lambda module, group, **kwargs: module)):
        function()


@pytest.mark.parametrize(
    ("target", "function"),
    [(PartRandom, parts_differ), (CommonRandom, wholes_are_equal), (CommonRandom, samples)],
)
def test_a_random_state_that_is_not_switched_is_found(pool: Pool, target: Any, function: Any) -> None:
    with pytest.raises(AssertionError):
        pool.run(2, unmarked, target, function)
