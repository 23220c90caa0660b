"""The tensor-parallel benchmark runs, checks all contenders and says what it measured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

# Of the import of torch.distributed.tensor.parallel's peers, see test_zero.py.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

CONTENDERS = (
    "echelon",
    "torch DTensor, plain",
    "torch DTensor, loss-parallel",
    "torch DTensor, sequence-parallel",
    "transformers DistributedConfig",
)


@pytest.mark.slow
def test_it_compares_all_contenders(run_quickly: Callable[..., str], tmp_path: Path) -> None:
    times, picture = tmp_path / "times.json", tmp_path / "times.png"
    printed = run_quickly("tensor.py", "--json", str(times), "--plot", str(picture))
    found = json.loads(times.read_text())
    assert tuple(found["seconds"]) == tuple(found["agreement"]) == CONTENDERS
    assert all(len(seconds) == 3 for seconds in found["seconds"].values())
    assert all(error <= 1e-4 for each in found["agreement"].values() for error in each.values())
    assert found["settings"]["tp"] == 2
    assert picture.stat().st_size > 1000
    ratio = found["summary"]["ratio_to_best_peer"]
    assert printed.splitlines()[-1] == f"ratio_to_best_peer={ratio:.3f}"
    assert found["summary"]["best_peer"] in CONTENDERS[1:]
