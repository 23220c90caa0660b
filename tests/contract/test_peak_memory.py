"""The peak of a rank of 4,096 equals the ledger plus the activations by docs/cuda.md, measured on fake tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..cuda_page import table, value
from ..gpu.many import CLUSTERS

ROOT = Path(__file__).parents[2]
CASES = ("8B first", "8B middle", "8B middle recomputed", "70B middle", "70B middle recomputed")


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_a_rank_of_many_allocates_as_much_as_the_page_says(case: str) -> None:
    size, place, *recomputed = case.split()
    name = f"{size} tp8·pp8·dp64"
    command = [sys.executable, "-m", "tests.peak_memory", name, place, *recomputed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    sizes, (tp, pp, _) = CLUSTERS[name].sizes, CLUSTERS[name].axes
    terms = {
        "x": 2 * CLUSTERS[name].length * sizes["hidden_size"],
        "tp": tp,
        "t": tp if dict(CLUSTERS[name].options).get("enable_sequence_parallelism") else 1,
        "recomputed": bool(recomputed),
        "f": sizes["intermediate_size"] / sizes["hidden_size"],
        "g": sizes["num_key_value_heads"] / sizes["num_attention_heads"],
    }
    nbytes = {what: value(cell, terms) for what, where, cell, _ in table("Memory") if value(where, terms)}
    kept = nbytes["kept"] * measured["layers"] * (pp - measured["stage"])
    beside = measured["peak"] - measured["held"]
    assert 0.99 * kept <= beside <= kept + nbytes["layer"] + nbytes["at work"]
