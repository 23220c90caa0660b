"""A checkpoint of an earlier release resumes with the losses of its run, under its own layout and another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ..pool import Pool
from ..slow import slow_except
from .old_checkpoints import RUNS, WRITTEN, Run, losses_of, mean_over_ranks

# float32 sums in another order; in 16 bits, weights rounded by another machine's kernels.
ALLOWED = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}


def goes_on(pool: Pool, name: str, run: Run, folder: Path) -> None:
    copy = shutil.copytree(WRITTEN / name, folder / name)
    expected = json.loads((WRITTEN / "losses.json").read_text())[name]
    losses = mean_over_ranks(pool.run(run.world_size, losses_of, run, copy, goes_on=True))
    assert losses == pytest.approx(expected, rel=ALLOWED[run.arguments["precision"]])


@pytest.mark.parametrize("name", slow_except(("offload",), RUNS))
def test_resumes_under_its_own_layout(pool: Pool, name: str, tmp_path: Path) -> None:
    goes_on(pool, name, RUNS[name], tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_resumes_in_one_process(pool: Pool, name: str, tmp_path: Path) -> None:
    arguments = RUNS[name].arguments
    kept = {key: value for key, value in arguments.items() if key not in ("tp_size", "pp_size", "pp_style")}
    goes_on(pool, name, replace(RUNS[name], world_size=1, arguments=kept), tmp_path)
