"""Masks in one process: packed texts have the loss of the plain call, and masks that a ring cannot apply are refused.

Packed texts, and queries that attend to no key, are tested under layouts by contract/variant_rows.py.
"""

from typing import Any

import pytest
import torch

from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice

from ..contract.variant_rows import packed
from ..plugins.training import boosted, hybrid
from ..pool import Pool

# Settings of the cache by the user: none, in the config, in the call.
CACHES: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "as by default": ({}, {}),
    "none in the config": ({"use_cache": False}, {}),
    "none in the call": ({}, {"use_cache": False}),
}


def test_one_process_gives_the_loss_of_the_plain_call(pool: Pool) -> None:
    pool.run(1, compare_calls)


def compare_calls() -> None:
    choice = ModelChoice(model_type="llama")
    model, batch = choice.build(), packed(choice, num_samples=3, seed=0)
    expected = {cache: model(**batch, **arguments).loss.item() for cache, (_, arguments) in CACHES.items()}
    assert expected["as by default"] != expected["none in the call"]
    booster = hybrid(num_microbatches=1)
    wrapped, optimizer = boosted(booster, choice)
    for cache, (_, arguments) in CACHES.items():
        assert wrapped(**batch, **arguments).loss.item() == expected[cache]
        data = iter([batch | arguments])
        step = booster.execute_pipeline(data, wrapped, loss_of, optimizer, return_outputs=True)
        assert float(step["loss"]) == expected[cache]
        assert step["outputs"].past_key_values is None


# Masks of every query and key with an effect in eager or fused attention that a ring cannot reproduce.
WHOLE_MASKS = {
    "rows without a visible key": (
        "sdpa",
        torch.full((1, 1, 4, 4), -1e9),
        "hides all keys in some rows, down to -1e+09",
    ),
    "booleans": ("eager", torch.ones(1, 1, 4, 4, dtype=torch.bool), "add it to the scores as 0 and 1"),
}


@pytest.mark.parametrize("kind", WHOLE_MASKS)
def test_a_full_mask_that_a_ring_cannot_apply_is_refused_on_all_ranks(pool: Pool, kind: str) -> None:
    messages = pool.run(2, refusal, kind)
    assert messages[0] == messages[1] and WHOLE_MASKS[kind][2] in messages[0]


def refusal(kind: str) -> str:
    kernel, mask, _ = WHOLE_MASKS[kind]
    choice = ModelChoice(model_type="llama", settings=(("attn_implementation", kernel),))
    ring = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}
    model, *_ = hybrid(sp_size=2, **ring).boost(choice.build())
    ids = torch.arange(3, 7)[None]
    with pytest.raises(ValueError) as refused:
        model(input_ids=ids, labels=ids, attention_mask=mask)
    return str(refused.value)
