"""torch.compile and `generate` with boosted models. Refusals are in tests/refusals."""

from typing import Any

import pytest
import torch

from echelon.verify.model_choice import ModelChoice

from ..plugins.training import booster_of, hybrid
from ..pool import on_ranks

CHOICE = ModelChoice(model_type="llama", num_layers=2)
IDS = torch.arange(5, 11)[None]


@pytest.mark.slow  # torch traces the whole forward
@on_ranks(2)
def test_a_compiled_model_has_the_same_loss_by_calls_and_by_execute_pipeline() -> None:
    """Compiled in place; the loss counts labels."""
    labels = IDS.repeat(2, 1)
    labels[0, 3:] = -100
    batch = {"input_ids": IDS.repeat(2, 1), "labels": labels}
    booster = hybrid(zero_stage=1)
    model, *_ = booster.boost(CHOICE.build())
    with torch.no_grad():
        expected = model(**batch).loss
        frames: list[Any] = []
        model.compile(backend=lambda graph, _: frames.append(graph) or graph.forward)
        torch.testing.assert_close(booster.execute_pipeline(iter([batch]), model)["loss"], expected)
        assert frames, "execute_pipeline ran the model as it was"
        torch.testing.assert_close(model(**batch).loss, expected)


@pytest.mark.parametrize(
    ("plugin", "sizes"), [("ddp", {}), ("fsdp", {}), ("zero", {}), ("hybrid", {"tp_size": 2})], ids=str
)
@on_ranks(2)
def test_a_boosted_model_generates_as_the_plain_one(plugin: str, sizes: dict[str, int]) -> None:
    settings: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = CHOICE.build().eval().generate(IDS, **settings)
    model, *_ = booster_of(plugin, **sizes).boost(CHOICE.build())
    assert torch.equal(model.eval().generate(IDS, **settings), expected)
    assert torch.equal(model.generate(inputs=IDS, **settings), expected)
