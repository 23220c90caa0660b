"""Positions of several axes (3, B, S), as Qwen2-VL's, are cut along the batch."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer.tables.decoders import LLAMA
from echelon.verify.batch import loss_of

from ..models.stand_ins import NO_FLASH_ATTN, installed_flash_attn
from ..pool import Pool
from ..slow import slow_row
from .training import RING, ULYSSES, boosted, hybrid, norm_of_gradients, sgd

_TEXT = "language_model"  # from the base model
TABLE = replace(
    LLAMA,
    stage=StagePlan(layers=f"{_TEXT}.layers", entry=(f"{_TEXT}.embed_tokens", "visual")),
    embedding=f"{_TEXT}.embed_tokens",
    query_heads="self_attn.num_heads",
    key_value_heads="self_attn.num_key_value_heads",
    divide=("self_attn.num_heads",),
    divide_key_value=("self_attn.num_key_value_heads",),
    divisible=(),
)


def build(kernel: str = "sdpa") -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision)
    model: Any = Qwen2VLForConditionalGeneration
    return model._from_config(config, attn_implementation=kernel, dtype=torch.float32).train()


def batch_of(samples: int, axes: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(samples)
    ids = torch.randint(3, 60, (samples, 8), generator=drawn)
    positions = torch.randint(0, 8, (axes, samples, 8), generator=drawn).sort(-1).values
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def trained(sizes: dict[str, Any], samples: int, axes: int) -> tuple[float, float]:
    """Return the loss of a batch, and the norm of all gradients."""
    booster = hybrid(num_microbatches=3, max_norm=1.0, custom_policy=TABLE, **sizes)
    model, optimizer = boosted(booster, build(), sgd)
    loss = booster.execute_pipeline(iter([batch_of(samples, axes)]), model, loss_of, optimizer)["loss"]
    optimizer.step()
    return float(loss), float(optimizer.get_grad_norm())


@pytest.mark.parametrize("samples, axes", [(3, 3), (3, 4), slow_row(6, 3)])
def test_any_batch_trains_as_one_process_does(pool: Pool, samples: int, axes: int) -> None:
    expected = pytest.approx(alone("sdpa", batch_of(samples, axes)), rel=1e-5)
    assert pool.run(1, trained, {}, samples, axes)[0] == expected
    for sizes in ({"pp_size": 2}, {"tp_size": 2}, RING):
        assert pool.run(2, trained, sizes, samples, axes) == [expected] * 2


def packed_batch(rows: int, axes: int, *, is_padded: bool) -> dict[str, Tensor]:
    """Make two texts in each row for a call without a cache; the first axis has the positions in the texts."""
    batch = batch_of(rows, axes)
    batch["position_ids"] = batch["position_ids"].clone()
    batch["position_ids"][0] = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    if is_padded:
        batch["attention_mask"] = torch.ones(rows, 8, dtype=torch.long)
        batch["attention_mask"][0, 6:] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "use_cache": False}


def alone(kernel: str, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the loss of the plain model, and the norm of all gradients."""
    with installed_flash_attn() if kernel != "sdpa" else nullcontext():
        model = build(kernel)
        loss = model(**batch).loss
        loss.backward()
        return loss.item(), norm_of_gradients(model)


def called(sizes: dict[str, Any], kernel: str, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the same of a call of the boosted model."""
    with installed_flash_attn() if kernel != "sdpa" else nullcontext():
        booster = hybrid(custom_policy=TABLE, max_norm=1.0, **sizes)
        model, optimizer = boosted(booster, build(kernel), sgd)
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        return loss.item(), float(optimizer.get_grad_norm())


@pytest.mark.parametrize(
    "sizes, kernel",
    [(RING, "sdpa"), slow_row(RING, "flash_attention_2"), slow_row(ULYSSES, "flash_attention_2")],
)
def test_packed_and_padded_texts_are_seen_as_in_one_process(
    pool: Pool, sizes: dict[str, Any], kernel: str
) -> None:
    if kernel != "sdpa" and NO_FLASH_ATTN:
        pytest.skip(NO_FLASH_ATTN)
    for rows, axes, is_padded in product((1, 2), (3, 4), (False, True)):
        batch = packed_batch(rows, axes, is_padded=is_padded)
        expected = pytest.approx(pool.run(1, alone, kernel, batch)[0], rel=1e-5)
        assert pool.run(2, called, sizes, kernel, batch) == [expected] * 2, (rows, axes, is_padded)
