"""Experts whose part on a rank torch's grouped product does not take: refused at boost, with what to do instead."""

from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from echelon import Booster, HybridParallelPlugin
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer, parity

from ..pool import Pool

NARROW = (("intermediate_size", 48),)
REFUSAL = (
    "tp_size=4 leaves 12 of the 48 columns of model.layers.0.block_sparse_moe.experts to a rank, and torch's grouped "
    "product takes rows of a multiple of 16 bytes: use tp_size=1 or 2 or 3, or call "
    "model.set_experts_implementation('eager') before boost"
)


@dataclass(frozen=True, kw_only=True)
class LoopChoice(ModelChoice):
    """A small model that computes one expert after the other."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        model.set_experts_implementation("eager")
        return model


@pytest.mark.skipif(
    "qwen3_5_text" not in CONFIG_MAPPING, reason="older releases do not say how to split GraniteMoe"
)
def test_a_width_that_the_product_does_not_take_is_refused_at_boost(pool: Pool) -> None:
    assert pool.run(4, refusal, "fp16") == [REFUSAL] * 4


def refusal(precision: str) -> str:
    model = ModelChoice(model_type="granitemoe", settings=NARROW).build()
    booster = Booster(plugin=HybridParallelPlugin(tp_size=4, precision=precision, num_microbatches=1))
    with pytest.raises(ValueError) as refused:
        booster.boost(model, make_optimizer(model))
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "layout"),
    [
        (LoopChoice(model_type="granitemoe", settings=NARROW), Layout(tp=4, precision="fp16")),
        (ModelChoice(model_type="granitemoe", settings=NARROW), Layout(tp=2, precision="fp16")),
        (ModelChoice(model_type="granitemoe", settings=NARROW), Layout(tp=4)),
    ],
    ids=["one after the other", "fewer ranks", "fp32"],
)
def test_what_is_advised_trains_as_one_process_does(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    assert pool.run(layout.world_size, parity, choice, layout)[0].departure is None
