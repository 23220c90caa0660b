"""The page about LoRA: its script as it stands, on two ranks; what it saves, read by peft in a plain process."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ..test_readme import code_blocks, run_script
from .test_shardformer_alone import losses

PAGE = Path(__file__).parents[2] / "docs" / "lora.md"
ENDING = """
from echelon import DistCoordinator

DistCoordinator().destroy()
"""


@pytest.mark.slow
def test_the_script_trains_adapters_that_peft_finds(tmp_path: Path) -> None:
    (script,) = code_blocks(PAGE, "python")
    found = losses(run_script(script + ENDING, tmp_path, num_processes=2))
    assert len(found) == 10
    assert found[-1] < found[0]
    stored = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    shapes = {re.sub(r".*\d\.", "", name): tuple(each.shape) for name, each in stored.items()}
    assert shapes == {
        f"self_attn.{layer}.lora_{part}.weight": shape
        for layer in ("q_proj", "v_proj")
        for part, shape in (("A", (8, 32)), ("B", (32, 8)))
    }
