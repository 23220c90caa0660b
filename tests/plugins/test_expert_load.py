"""Tokens per expert as the plugin counts them, beside those of a plain process."""

from typing import Any

import pytest
import torch

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ..pool import Pool
from .training import hybrid, refused, sgd, share

CHOICE = ModelChoice(model_type="mixtral", num_layers=2)
LLAMA = ModelChoice(model_type="llama", num_layers=1)
LAYOUTS = (
    Layout(dp=2, recompute=1.0),
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, recompute=1.0),
    Layout(dp=2, ep=2, recompute=1.0, recompute_modules=("mlp.experts",)),
    Layout(pp=2, dp=2, ep=2, recompute=1.0, schedule="zbh1"),
    Layout(tp=2, dp=2, ep=2, sequence="split_gather"),
)


def counted_alone() -> dict[str, list[int]]:
    """Return tokens per expert of the first step's batch, by layer, in a forward of transformers alone."""
    model, counts = CHOICE.build(), {}

    def count(path: str, num_experts: int, inputs: Any) -> None:
        counts[path] = torch.bincount(inputs[1].flatten(), minlength=num_experts).tolist()

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(lambda m, args, path=path: count(path, m.num_experts, args))
    model(**make_batch(CHOICE, num_samples=8, seed=0))
    return counts


def counted(layout: Layout) -> tuple[dict[str, list[int]], float, dict[str, list[int]]]:
    """Return the tokens of the first step, the first layer's imbalance, and the tokens of a call without gradients."""
    booster = hybrid(**{**layout.arguments, "num_microbatches": 2})
    plain = CHOICE.build()
    model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
    booster.execute_pipeline(share(booster, CHOICE, 0), model, loss_of, optimizer)
    optimizer.step()
    first = model.expert_load()
    with torch.no_grad():
        booster.execute_pipeline(share(booster, CHOICE, 0), model, loss_of)
    then = model.expert_load()
    tokens, later = ({path: each.tokens for path, each in load.items()} for load in (first, then))
    return tokens, next(iter(first.values())).imbalance, later


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_tokens_of_an_expert_are_those_of_one_process(pool: Pool, layout: Layout) -> None:
    expected = counted_alone()
    highest = [max(each) * len(each) / sum(each) for each in expected.values()]
    for tokens, imbalance, later in pool.run(layout.world_size, counted, layout):
        assert tokens == expected
        assert imbalance == highest[0] > 1
        assert later == {path: [0] * len(each) for path, each in expected.items()}


def asked_without_experts() -> str:
    booster, plain = hybrid(), LLAMA.build()
    model, *_ = booster.boost(plain, sgd(plain))
    return refused(model.expert_load)


def test_a_model_without_experts_has_no_load(pool: Pool) -> None:
    for error in pool.run(2, asked_without_experts):
        assert "the model has no experts" in error
