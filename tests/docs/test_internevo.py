"""The page for those who come from InternEvo: its configuration means what it says, and its script trains."""

import re
from math import isfinite
from pathlib import Path

import pytest

from echelon.plugins.internevo import plugin_arguments

from ..test_readme import code_blocks, run_script

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-internevo.md"


def config_file(folder: Path) -> Path:
    (config,) = code_blocks(PAGE, "py")
    path = folder / "config.py"
    path.write_text(config)
    return path


def test_the_configuration_becomes_arguments(tmp_path: Path) -> None:
    assert plugin_arguments(config_file(tmp_path)) == {
        "tp_size": 1,
        "pp_size": 1,
        "sp_size": 2,
        "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": "all_to_all",
        "wp_size": 4,
        "wp_overlap": True,
        "wp_memory_pool": True,
        "zero_stage": 1,
        "zero_size": -1,
        "num_microbatches": 2,
        "precision": "fp32",
        "enable_flash_attention": False,
        "overlap_communication": True,
        "overlap_allgather": False,
        "zero_bucket_size_in_m": 512,
        "max_norm": 1.0,
        "initial_scale": 2**16,
        "min_scale": 1,
        "growth_interval": 1000,
        "growth_factor": 2,
        "backoff_factor": 0.5,
    }


@pytest.mark.slow
def test_the_script_trains_on_four_ranks(tmp_path: Path) -> None:
    config_file(tmp_path)
    (script,) = code_blocks(PAGE, "python")
    printed = run_script(script, tmp_path, num_processes=4)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 4  # 32 samples, two replicas, batches of 4
    assert all(map(isfinite, losses))
