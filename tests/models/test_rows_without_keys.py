"""Masks that a ring cannot follow are refused. Queries that see no key are rows of the contract."""

import pytest
import torch

from echelon import Booster, HybridParallelPlugin
from echelon.verify.models import ModelChoice

from ..pool import Pool

# Of masks of every query and key: what eager or fused attention makes of it cannot be had round a ring.
WHOLE_MASKS = {
    "numbers that all hide": (
        "sdpa",
        torch.full((1, 1, 4, 4), -1e9),
        "numbers that all hide, down to -1e+09",
    ),
    "booleans": ("eager", torch.ones(1, 1, 4, 4, dtype=torch.bool), "adds to the scores as 0 and 1"),
}


@pytest.mark.parametrize("kind", WHOLE_MASKS)
def test_a_whole_mask_that_a_ring_cannot_follow_is_refused_on_all_ranks(pool: Pool, kind: str) -> None:
    found = pool.run(2, refusal, kind)
    assert found[0] == found[1] and WHOLE_MASKS[kind][2] in found[0]


def refusal(kind: str) -> str:
    kernel, mask, _ = WHOLE_MASKS[kind]
    choice = ModelChoice(model_type="llama", settings=(("attn_implementation", kernel),))
    plugin = HybridParallelPlugin(
        sp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="ring_attn",
        precision="fp32",
        num_microbatches=1,
    )
    model, *_ = Booster(plugin=plugin).boost(choice.build())
    ids = torch.arange(3, 7)[None]
    with pytest.raises(ValueError) as refused:
        model(input_ids=ids, labels=ids, attention_mask=mask)
    return str(refused.value)
