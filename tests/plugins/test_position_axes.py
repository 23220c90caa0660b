"""Positions of several axes (3, B, S), as Qwen2-VL's, are cut along the batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from echelon.pipeline.plan import StagePlan
from echelon.shardformer.tables.decoders import LLAMA
from echelon.verify.batch import loss_of

from ..pool import Pool
from .training import hybrid, sgd

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
RING = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}


def build() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision)
    return Qwen2VLForConditionalGeneration(config)


def batch_of(samples: int, axes: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(samples)
    ids = torch.randint(3, 60, (samples, 8), generator=drawn)
    positions = torch.randint(0, 8, (axes, samples, 8), generator=drawn).sort(-1).values
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def trained(sizes: dict[str, Any], samples: int, axes: int) -> dict[str, float]:
    """Return the loss of a batch, and the norm of all gradients."""
    booster = hybrid(num_microbatches=3, max_norm=1.0, custom_policy=TABLE, **sizes)
    plain = build()
    model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
    loss = booster.execute_pipeline(iter([batch_of(samples, axes)]), model, loss_of, optimizer)["loss"]
    optimizer.step()
    return {"loss": float(loss), "norm": float(optimizer.get_grad_norm())}


@pytest.mark.parametrize("samples, axes", [(3, 3), (6, 3), (3, 4)])
def test_any_batch_trains_as_one_process_does(pool: Pool, samples: int, axes: int) -> None:
    model = build()
    loss = loss_of(model(**batch_of(samples, axes)), {})
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    expected = pytest.approx({"loss": loss.item(), "norm": float(norm)}, rel=1e-5)
    assert pool.run(1, trained, {}, samples, axes)[0] == expected
    for sizes in ({"pp_size": 2}, {"tp_size": 2}, RING):
        assert pool.run(2, trained, sizes, samples, axes) == [expected] * 2
