"""Layers compiled one by one (compile_layers): one graph each, the same numbers and masks, reductions that overlap."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.shardformer.compiled_layers import compile_layers
from echelon.verify.batch import loss_of
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity
from echelon.zero.bucket import GradientState

from ..compiled import HIDDEN, traced_layers
from ..pool import Pool, on_ranks
from .test_dropout_masks import losses_of
from .training import RECOMPUTED, REGIONS, RING, ULYSSES, boosted, hybrid, steps

LLAMA = ModelChoice(model_type="llama", num_layers=3)
COMPILED = {"compile_layers": True}


def made(**settings: Any) -> tuple[Any, Any, Any]:
    """Return a booster without microbatches, the boosted model and its optimizer."""
    booster = hybrid(**{"num_microbatches": 1} | settings)
    return booster, *boosted(booster, LLAMA)


def batch_of(length: int) -> dict[str, Tensor]:
    ids = torch.arange(2 * length).view(2, length) * 7 % 90 + 5
    return {"input_ids": ids, "labels": ids}


def gradients_by_lengths(settings: dict[str, Any], lengths: list[int]) -> tuple[int, list[float]]:
    """Return the number of compiled graphs, and the loss of each step."""
    with traced_layers(may_break=True) as graphs:
        losses = [*steps(*made(**settings, **COMPILED), map(batch_of, lengths))]
    return len(graphs), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"tp_size": 2}, REGIONS, ULYSSES], ids=["tp", "split_gather", "all_to_all"]
)
def test_other_lengths_compile_once_more_and_no_further(pool: Pool, settings: dict[str, Any]) -> None:
    lengths = [16, 12, 9, 14, 11, 18, 13, 10]
    for number, losses in pool.run(2, gradients_by_lengths, settings, lengths):
        assert number <= 4  # for the first length; for all lengths; divisible and not divisible by the ranks
        assert all(loss == loss for loss in losses)


@pytest.mark.slow  # the compiler starts on two ranks
@on_ranks(2)
def test_reductions_start_before_the_backward_of_other_layers() -> None:
    """When backward reaches the first layer, some buckets are in flight."""
    states: list[list[GradientState]] = []
    with traced_layers(most_graphs=1):
        booster, model, optimizer = made(zero_stage=1, zero_bucket_size_in_m=2**-10, **COMPILED)

        def watch(layer: nn.Module, args: tuple, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda _: states.append([bucket.state for bucket in optimizer.buckets]))

        model.unwrap().model.layers[0].register_forward_hook(watch)
        booster.execute_pipeline(iter([batch_of(8)]), model, loss_of, optimizer)
    (of_buckets,) = states
    assert {GradientState.REDUCING, GradientState.LOCAL} == set(of_buckets), of_buckets


@pytest.mark.slow
@on_ranks(2)
def test_names_do_not_change() -> None:
    """Compare names of tensors and modules before and after the first call."""
    with traced_layers(most_graphs=1):
        plain, compiled = (made(tp_size=2, **settings)[1] for settings in ({}, COMPILED))
        for call in (lambda: None, lambda: compiled(**batch_of(8))):
            call()
            assert list(plain.tensors()) == list(compiled.tensors())
            assert [*dict(plain.named_modules())] == [*dict(compiled.named_modules())]


def masks_with(settings: dict[str, Any]) -> list[float]:
    with traced_layers(may_break=True):
        return losses_of("hybrid", settings | COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"pp_size": 2},
        {"tp_size": 2},
        {"tp_size": 2} | RECOMPUTED,
        {"zero_stage": 2} | RECOMPUTED,
        ULYSSES,
        RING,
    ],
    ids=str,
)
def test_compiled_layers_drop_the_same_entries(pool: Pool, settings: dict[str, Any]) -> None:
    expected = [pytest.approx(losses, rel=1e-5) for losses in pool.run(2, losses_of, "hybrid", settings)]
    assert pool.run(2, masks_with, settings) == expected


class Block(nn.Module):
    """A layer with a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


def test_layers_share_a_graph_unless_their_modules_have_hooks_in_other_places() -> None:
    layers = [Block() for _ in range(4)]
    for index in (1, 2):
        layers[index].inner.register_forward_hook(lambda module, args, output: output * 10)
    x = torch.ones(2, 3)
    expected = [layer(x) for layer in layers]
    with traced_layers(most_graphs=2):
        compile_layers(layers)
        for layer, wanted in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), wanted)


@pytest.mark.slow  # inductor compiles C++
@pytest.mark.filterwarnings(*(f"ignore:{message}" for message in HIDDEN))
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, dp=2, zero=1, recompute=0.5, options=("compile_layers",)),
        Layout(tp=2, sequence="split_gather", precision="bf16", options=("compile_layers",)),
    ],
    ids=str,
)
def test_inductor_computes_the_same(pool: Pool, layout: Layout) -> None:
    for report in pool.run(layout.world_size, parity, LLAMA, layout, num_steps=2, timeout=600.0):
        assert report.departure is None
