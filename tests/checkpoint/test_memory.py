"""Nobody gathers a model or an optimizer: saving and loading need a tensor or two beyond what a rank holds."""

from pathlib import Path
from typing import Any

import pytest

from . import memory
from .failures import in_warm_process

# Beside tensors: pages that are counted whole, pickled plans, threads' stacks.
SLACK = 4 * memory.MEBI


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("world", "layout"), [(4, {"tp_size": 2, "pp_size": 2}), (2, {"zero_stage": 1})], ids=str
)
def test_saving_and_loading_need_little_beyond_what_is_held(tmp_path: Path, world: int, layout: Any) -> None:
    in_warm_process(memory.measure, tmp_path, world, layout, seconds=250)
    for rank, peaks in enumerate(memory.found(tmp_path, world)):
        told = f"rank {rank}: " + ", ".join(
            f"{name} {size / memory.MEBI:.1f} MiB" for name, size in peaks.items()
        )
        print(told)
        few = 1.5 * memory.LARGEST + SLACK  # a tensor that it writes, and its half of one that it sends
        share = 1.1 * memory.EVERYTHING / world
        assert peaks["save"] <= few and peaks["model"] <= few, told
        assert peaks["async"] <= share + few, told
        assert peaks["load"] <= peaks["states"] + few, (
            told
        )  # these are made; a box, and the file's pages with it
