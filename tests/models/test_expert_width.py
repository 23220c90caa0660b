"""Experts whose part on a rank torch's grouped product does not take: refused at boost, with what to do instead."""

import pytest
from transformers import CONFIG_MAPPING

from echelon import Booster, HybridParallelPlugin
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool

NARROW = (("intermediate_size", 48),)
REFUSAL = (
    "tp_size=4 leaves 12 of the 48 columns of model.layers.0.block_sparse_moe.experts to a rank, and torch's grouped "
    "product takes rows of a multiple of 16 bytes: use tp_size=1 or 2 or 3, or call "
    "model.set_experts_implementation('eager') before boost"
)


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
