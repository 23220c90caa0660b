"""Batches with queries that see no key, under ring attention beside one process: left padding, and a mask of zeros.

Eager attention gives such a query the mean of all values, torch's own gives it 0; `ring_attn` does what the model does.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from echelon import Booster, HybridParallelPlugin
from echelon.verify import parity as parity_check
from echelon.verify.batch import make_batch
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ..pool import Pool
from .stand_ins import LOOKS_FOR_FLASH_ATTN, installed_flash_attn
from .test_features import EagerChoice

RING = Layout(sp=2, sequence="ring_attn")
FURTHER = (
    Layout(sp=4, sequence="ring_attn", inner_ring=2),
    Layout(sp=2, tp=2, sequence="ring_attn"),
    Layout(sp=2, pp=2, sequence="ring_attn", recompute=1.0),
    Layout(sp=2, sequence="ring_attn", precision="bf16"),
    Layout(sp=2, sequence="ring_attn", precision="fp16"),
    Layout(sp=2, sequence="all_to_all"),
)
# Some have windows of 5 tokens, some cap their scores, and the last two see both ways.
EAGER = ("llama", "gemma2", "gemma3_text", "mistral", "gpt2", "bert", "roberta")
QUICK = {("llama", str(RING)), ("gemma2", str(RING)), ("bert", str(RING))}


def rows() -> list[object]:
    pairs = [*((name, RING) for name in EAGER), *((name, each) for name in EAGER[:2] for each in FURTHER)]
    pairs.append(("gpt_oss", FURTHER[-1]))  # with sinks, which a ring does not take
    return [
        pytest.param(
            EagerChoice(model_type=name),
            layout,
            id=f"{name}-{layout}",
            marks=() if (name, str(layout)) in QUICK else pytest.mark.slow,
        )
        for name, layout in pairs
    ]


@pytest.mark.parametrize(("choice", "layout"), rows())
def test_eager_attention_trains_as_in_one_process(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    assert pool.run(layout.world_size, train, choice, layout, timeout=180.0)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("layout", [RING, Layout(sp=2, sequence="all_to_all")], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "roberta"])
def test_fused_attention_trains_as_in_one_process(pool: Pool, model_type: str, layout: Layout) -> None:
    assert pool.run(2, train, ModelChoice(model_type=model_type), layout)[0] is None


@LOOKS_FOR_FLASH_ATTN
@pytest.mark.slow
@pytest.mark.parametrize("layout", [RING, Layout(sp=2, sequence="all_to_all")], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_flash_attention_trains_as_in_one_process(pool: Pool, model_type: str, layout: Layout) -> None:
    assert pool.run(2, train_with_flash, model_type, layout)[0] is None


def train_with_flash(model_type: str, layout: Layout) -> str | None:
    settings = (("attn_implementation", "flash_attention_2"),)
    with installed_flash_attn():
        return train(ModelChoice(model_type=model_type, settings=settings), layout)


def train(choice: ModelChoice, layout: Layout) -> str | None:
    with mock.patch.object(parity_check, "make_batch", padded_batch):
        return parity_check.parity(choice, layout).departure


def padded_batch(choice: ModelChoice, **given: Any) -> dict[str, Tensor]:
    """Of a causal model one padded on the left; of another with a mask of zeros for the last sample."""
    batch = make_batch(choice, **given)
    if choice.head_name == "causal":
        return {name: value.flip(-1) for name, value in batch.items()}
    mask = batch["attention_mask"].clone()
    mask[-1] = 0
    return batch | {"attention_mask": mask}


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
