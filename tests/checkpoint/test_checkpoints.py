"""A run goes on from its checkpoint as if it had never stopped, under its own layout and under others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ..pool import Pool
from . import runs

PAIRS: tuple[tuple[int, dict[str, Any], int, dict[str, Any], dict[str, Any]], ...] = (
    (4, {"tp_size": 2, "zero_stage": 1}, 2, {"pp_size": 2}, {}),
    (2, {"zero_stage": 2, "precision": "bf16"}, 4, {"tp_size": 2, "pp_size": 2, "precision": "bf16"}, {}),
    (2, {"pp_size": 2}, 2, {"tp_size": 2, "zero_stage": 1}, {"tie_word_embeddings": True}),
)


@pytest.mark.parametrize(("saving", "saver", "loading", "loader", "config"), PAIRS, ids=str)
def test_a_run_goes_on_under_another_layout(
    pool: Pool, tmp_path: Path, saving: int, saver: Any, loading: int, loader: Any, config: Any
) -> None:
    first = pool.run(saving, runs.save_at_three, tmp_path, saver, config)[0]
    second = pool.run(loading, runs.go_on, tmp_path, loader, config)[0]
    assert first["saved"].keys() == second["saved"].keys()
    for name, tensor in first["saved"].items():
        assert torch.equal(tensor, second["saved"][name]), name
    assert second["rate"] == first["rate"]
    tolerance = 1e-6 if saver.get("precision", "fp32") == "fp32" else 5e-3
    assert second["losses"] == pytest.approx(first["losses"], rel=tolerance)


@pytest.mark.parametrize(
    "plugin", ({"tp_size": 2, "zero_stage": 1}, {"pp_size": 2, "precision": "fp16"}), ids=str
)
def test_the_same_layout_goes_on_bit_for_bit_with_dropout(pool: Pool, tmp_path: Path, plugin: Any) -> None:
    config = {"attention_dropout": 0.2}
    first = pool.run(4, runs.save_at_three, tmp_path, plugin, config)
    second = pool.run(4, runs.go_on, tmp_path, plugin, config)
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["end"][name], other["end"][name]) for name in one["end"])


def test_from_pretrained_reads_what_was_saved(pool: Pool, tmp_path: Path) -> None:
    plugin = {"tp_size": 2, "pp_size": 2, "precision": "bf16"}
    saved = pool.run(4, runs.save_at_three, tmp_path, plugin, {})[0]["saved"]
    folder = tmp_path / "step-00000003" / "model"
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype is torch.bfloat16
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("shard", (False, True))
def test_experts_saved_by_parts_are_read_by_from_pretrained(pool: Pool, tmp_path: Path, shard: bool) -> None:
    path = tmp_path / "model" if shard else tmp_path / "model" / "model.safetensors"
    logits = pool.run(2, runs.save_mixtral, path)[0]
    if not shard:
        runs.MIXTRAL.config().save_pretrained(path.parent)
    model, told = AutoModelForCausalLM.from_pretrained(
        path if shard else path.parent, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(model.eval()(torch.arange(12).view(1, 12)).logits, logits, atol=1e-5)
