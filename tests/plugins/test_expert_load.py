"""Tokens per expert as the plugin counts them, beside those of a plain process."""

from functools import partial
from typing import Any

import pytest
import torch

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..slow import slow_row
from .training import boosted, hybrid, sgd, share, steps

CHOICE = ModelChoice(model_type="mixtral", num_layers=2)
# Calls of their own: one-hot choices with a capacity, and experts without parameters.
SWITCH, LONGCAT = (
    ModelChoice(model_type=model_type) for model_type in ("switch_transformers", "longcat_flash")
)
LAYOUTS = (
    Layout(dp=2, recompute=1.0),
    Layout(dp=2, ep=2, recompute=1.0),
    Layout(pp=2, dp=2, ep=2, recompute=1.0, schedule="zbh1"),
)
FURTHER = (
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, recompute=1.0, recompute_modules=("mlp.experts",)),
    Layout(tp=2, dp=2, ep=2, sequence="split_gather"),
)


def counted_alone(choice: ModelChoice = CHOICE) -> dict[str, list[int]]:
    """Return tokens per expert of the first step's batch, by layer, in a forward of transformers alone."""
    model, counts = choice.build(), {}

    def count(module: Any, inputs: Any, *, path: str) -> None:
        if choice is SWITCH:
            counts[path] = inputs[1].sum((0, 1)).tolist()
        else:
            number = module.num_routed_experts if choice is LONGCAT else module.num_experts
            counts[path] = torch.bincount(inputs[1].flatten(), minlength=number).tolist()[:number]

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(partial(count, path=path))
    model(**make_batch(choice, num_samples=8, seed=0))
    return counts


def counted(
    layout: Layout, choice: ModelChoice = CHOICE
) -> tuple[dict[str, list[int]], float, dict[str, list[int]]]:
    """Return the tokens of the first step, the first layer's imbalance, and the tokens of a call without gradients."""
    booster = hybrid(**{**layout.arguments, "num_microbatches": 2})
    model, optimizer = boosted(booster, choice, sgd)
    next(steps(booster, model, optimizer, share(booster, choice, 0)))
    first = model.expert_load()
    with torch.no_grad():
        booster.execute_pipeline(share(booster, choice, 0), model, loss_of)
    then = model.expert_load()
    tokens, later = ({path: layer_load.tokens for path, layer_load in load.items()} for load in (first, then))
    return tokens, next(iter(first.values())).imbalance, later


@pytest.mark.parametrize("layout", [*LAYOUTS, *(slow_row(layout) for layout in FURTHER)], ids=str)
def test_the_tokens_of_an_expert_are_those_of_one_process(pool: Pool, layout: Layout) -> None:
    expected = counted_alone()
    highest = [max(counts) * len(counts) / sum(counts) for counts in expected.values()]
    for tokens, imbalance, later in pool.run(layout.world_size, counted, layout):
        assert tokens == expected
        assert imbalance == highest[0] > 1
        assert later == {path: [0] * len(counts) for path, counts in expected.items()}


@pytest.mark.parametrize(
    "choice", [slow_row(choice) for choice in (SWITCH, LONGCAT)], ids=lambda choice: choice.model_type
)
def test_experts_that_are_called_otherwise_are_counted(pool: Pool, choice: ModelChoice) -> None:
    expected = counted_alone(choice)
    assert expected
    for layout in (Layout(dp=2), Layout(dp=2, ep=2)):
        for tokens, _, _ in pool.run(2, counted, layout, choice):
            assert tokens == expected
