"""A checkpoint that is loaded and saved again, under another layout or precision, loses nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.checkpoint.difference import Comparison
from echelon.checkpoint.inspect import Findings, examine, open_folder

from ..pool import Pool
from . import runs

STEP = "step-00000003"
LAYOUTS: tuple[tuple[int, dict[str, Any], int, dict[str, Any], dict[str, Any]], ...] = (
    (4, {"tp_size": 2, "zero_stage": 1}, 2, {"pp_size": 2}, {}),
    (2, {"zero_stage": 2, "precision": "bf16"}, 4, {"tp_size": 2, "pp_size": 2, "precision": "bf16"}, {}),
    (
        2,
        {"pp_size": 2, "precision": "fp16"},
        2,
        {"tp_size": 2, "precision": "fp16"},
        {"tie_word_embeddings": True},
    ),
)


def save_again(directory: Path, out: Path, plugin: dict[str, Any], config: dict[str, Any]) -> None:
    run = runs.Run(runs.config_of(**config), seed=7, **plugin)
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None
    run.booster.save_checkpoint(out, resumed.step, **run.everything, user=resumed.user).wait()


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "saver", "loading", "loader", "config"), LAYOUTS, ids=str)
def test_a_checkpoint_saved_again_under_another_layout_is_equal_to_the_bit(
    pool: Pool, tmp_path: Path, saving: int, saver: Any, loading: int, loader: Any, config: Any
) -> None:
    pool.run(saving, runs.save_at_three, tmp_path / "a", saver, config)
    pool.run(loading, save_again, tmp_path / "a", tmp_path / "b", loader, config)
    for directory in ("a", "b"):
        folder = tmp_path / directory / STEP
        assert examine(folder, progress=lambda _: None) == Findings(errors=(), notes=())
    a, b = (open_folder(tmp_path / directory / STEP) for directory in ("a", "b"))
    assert a.training["layout"] != b.training["layout"]
    assert list(Comparison(a=a, b=b).differences(lambda _: None)) == []


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_float32_weights_and_masters_become_each_other(
    pool: Pool, tmp_path: Path, saved: str, loaded: str
) -> None:
    plugin = {"tp_size": 2, "precision": saved}
    before = pool.run(2, runs.save_at_three, tmp_path, plugin, {})[0]["saved"]
    after = pool.run(2, runs.go_on, tmp_path, {"zero_stage": 2, "precision": loaded}, {})[0]["saved"]
    for name, tensor in before.items():
        if name.startswith("master/"):
            weight = name.removeprefix("master/")
            assert torch.equal(after[name], tensor)
            assert torch.equal(after[weight], tensor if loaded == "fp32" else tensor.bfloat16())
        elif "/" in name:
            assert torch.equal(after[name], tensor)
