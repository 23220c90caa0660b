"""What ranks saved is sound, equal under every layout, and goes on after it was written again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.checkpoint.convert import Resharding
from echelon.checkpoint.damage import Findings, examine_checkpoint
from echelon.checkpoint.difference import Comparison
from echelon.checkpoint.opened import open_folder

from ..pool import Pool
from . import runs
from .again import save_again

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


def sound(folder: Path) -> None:
    assert examine_checkpoint(folder, progress=lambda _: None) == Findings(faults=(), notes=())


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "saver", "loading", "loader", "config"), LAYOUTS, ids=str)
def test_a_checkpoint_saved_again_under_another_layout_is_equal_to_the_bit(
    pool: Pool, tmp_path: Path, saving: int, saver: Any, loading: int, loader: Any, config: Any
) -> None:
    pool.run(saving, runs.save_at_three, tmp_path / "a", saver, config)
    pool.run(loading, save_again, tmp_path / "a", tmp_path / "b", loader, config)
    for directory in ("a", "b"):
        sound(tmp_path / directory / STEP)
    a, b = (open_folder(tmp_path / directory / STEP) for directory in ("a", "b"))
    assert a.training["layout"] != b.training["layout"]
    assert list(Comparison(a=a, b=b).differences(lambda _: None)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "saver", "loading", "loader", "config"), LAYOUTS[1:], ids=str)
def test_a_run_goes_on_from_what_was_written_again(
    pool: Pool, tmp_path: Path, saving: int, saver: Any, loading: int, loader: Any, config: Any
) -> None:
    first = pool.run(saving, runs.save_at_three, tmp_path / "a", saver, config)[0]
    reshard(tmp_path, None)
    second = pool.run(loading, runs.go_on, tmp_path / "b", loader, config)[0]
    assert first["saved"].keys() == second["saved"].keys()
    assert all(torch.equal(tensor, second["saved"][name]) for name, tensor in first["saved"].items())


@pytest.mark.slow
def test_a_run_in_float32_goes_on_in_16_bits_from_its_own_weights(pool: Pool, tmp_path: Path) -> None:
    saver, loader = {"tp_size": 2, "zero_stage": 1}, {"zero_stage": 2, "precision": "bf16"}
    saved = pool.run(2, runs.save_at_three, tmp_path / "a", saver, {})[0]["saved"]
    reshard(tmp_path, torch.bfloat16)
    loaded = pool.run(2, runs.go_on, tmp_path / "b", loader, {})[0]["saved"]
    for name, tensor in saved.items():
        if "/" in name:
            assert torch.equal(loaded[name], tensor)
        else:
            assert torch.equal(loaded[f"master/{name}"], tensor)
            assert torch.equal(loaded[name], tensor.bfloat16())


def reshard(directory: Path, dtype: torch.dtype | None) -> None:
    """From a/step-… to b/step-…."""
    (directory / "b").mkdir()
    out = directory / "b" / STEP
    opened = open_folder(directory / "a" / STEP)
    Resharding(opened=opened, out=out, max_bytes=20000, optimizer_files=3, dtype=dtype).write(lambda _: None)
    sound(out)
