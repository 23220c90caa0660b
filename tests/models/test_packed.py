"""Texts packed into rows by restarting position_ids, without an attention_mask, beside the plain call in one process.

transformers keeps such texts apart in a call without a cache, and the call's use_cache, or else the config, says
whether there is one. So it is under a layout: what `model(**batch)` means does not depend on Echelon.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from echelon import Booster, HybridParallelPlugin
from echelon.verify import parity as parity_check
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool
from .stand_ins import LOOKS_FOR_FLASH_ATTN, installed_flash_attn

LAYOUTS = (
    Layout(),
    Layout(tp=2),
    Layout(pp=2, recompute=1.0),
    Layout(sp=2, sequence="ring_attn"),
    Layout(sp=2, sequence="all_to_all"),
    Layout(tp=2, sequence="split_gather"),
    Layout(sp=2, pp=2, sequence="ring_attn", schedule="interleaved", chunks=2),
    Layout(dp=2, zero=2, precision="bf16"),
)
# What a user says of the cache: nothing, in the config, in the call.
CACHES: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "as by default": ({}, {}),
    "none in the config": ({"use_cache": False}, {}),
    "none in the call": ({}, {"use_cache": False}),
}
QUICK = LAYOUTS[1:4]


def rows() -> list[object]:
    return [
        pytest.param(
            model_type,
            cache,
            layout,
            id=f"{model_type}-{cache}-{layout}",
            marks=()
            if model_type == "llama" and layout in QUICK and cache == "as by default"
            else pytest.mark.slow,
        )
        for model_type in ("llama", "gemma2", "qwen2_moe")
        for cache in CACHES
        for layout in (LAYOUTS if model_type == "llama" else QUICK)
    ]


@pytest.mark.parametrize(("model_type", "cache", "layout"), rows())
def test_packed_texts_train_as_by_the_plain_call(
    pool: Pool, model_type: str, cache: str, layout: Layout
) -> None:
    settings, given = CACHES[cache]
    choice = ModelChoice(model_type=model_type, settings=tuple(settings.items()))
    assert pool.run(layout.world_size, train, choice, layout, given, timeout=120.0)[0] is None


def train(choice: ModelChoice, layout: Layout, given: dict[str, Any], rows: int = 7) -> str | None:
    def packed(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
        return packed_batch(choice, num_samples=rows, seed=seed) | given

    with mock.patch.object(parity_check, "make_batch", packed):
        return parity_check.parity(choice, layout).departure


def packed_batch(choice: ModelChoice, **size: Any) -> dict[str, Tensor]:
    """Two texts in each row."""
    batch = make_batch(choice, **size)
    rows, length = batch.pop("attention_mask").shape
    batch["labels"] = batch["input_ids"]
    positions = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])
    return batch | {"position_ids": positions.expand(rows, -1)}


def test_one_process_gives_the_loss_of_the_plain_call(pool: Pool) -> None:
    pool.run(1, compare_calls)


def compare_calls() -> None:
    choice = ModelChoice(model_type="llama")
    model, batch = choice.build(), packed_batch(choice, num_samples=3, seed=0)
    expected = {cache: model(**batch, **given).loss.item() for cache, (_, given) in CACHES.items()}
    assert expected["as by default"] != expected["none in the call"]
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=1))
    boosted, optimizer, *_ = booster.boost(model, make_optimizer(model))
    for cache, (_, given) in CACHES.items():
        assert boosted(**batch, **given).loss.item() == expected[cache]
        found = booster.execute_pipeline(
            iter([batch | given]), boosted, loss_of, optimizer, return_outputs=True
        )
        assert float(found["loss"]) == expected[cache]
        assert found["outputs"].past_key_values is None


@LOOKS_FOR_FLASH_ATTN
@pytest.mark.slow
@pytest.mark.parametrize("rows", [6, 3], ids=["two rows", "one row"])
@pytest.mark.parametrize("sequence", ["ring_attn", "all_to_all"])
def test_flash_attention_keeps_the_texts_of_one_row_apart(pool: Pool, sequence: str, rows: int) -> None:
    """It asks nothing of a cache, but whether a batch is one row."""
    assert pool.run(2, train_with_flash, sequence, rows)[0] is None


def train_with_flash(sequence: str, rows: int) -> str | None:
    choice = ModelChoice(model_type="llama", settings=(("attn_implementation", "flash_attention_2"),))
    with installed_flash_attn():
        return train(choice, Layout(sp=2, sequence=sequence, microbatches=3), {}, rows)
