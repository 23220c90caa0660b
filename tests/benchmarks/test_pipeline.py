"""The pipeline benchmark: that it runs, what it writes, and that its checks and ratios can fail."""

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from .conftest import BENCHMARKS

OURS = ("gpipe", "1f1b", "interleaved", "zbh1", "zbv")
TORCH = ("gpipe", "1f1b", "interleaved", "zbv")


@pytest.mark.slow
def test_every_contender_computes_the_same_and_all_of_it_is_reported(run_quickly, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    times, picture = tmp_path / "times.json", tmp_path / "times.png"
    printed = run_quickly("pipeline.py", "--json", str(times), "--plot", str(picture))

    last = printed.splitlines()[-1]
    assert re.fullmatch(r"ratio_to_best_peer=\d+\.\d{3} ratio_to_ideal=\d+\.\d{3}", last)
    assert printed.count("engine_ratio=") == 6
    found = json.loads(times.read_text())
    pipelines = {f"echelon {style}" for style in OURS} | {f"torch {style}" for style in TORCH}
    assert found["agreement"].keys() == pipelines
    assert all(max(errors.values()) <= 1e-4 for errors in found["agreement"].values())
    assert found["seconds"].keys() == pipelines | {"one process", "one process on each rank"}
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found["seconds"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def agree(error: float, missing: bool) -> dict[str, dict[str, float]]:
    """The check on two fakes, whose gradients differ as told; on one rank."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        check = importlib.import_module("contender")
        reference = Fake({"a": torch.ones(3), "b": torch.ones(3)})
        other = {"a": torch.ones(3), "b": torch.ones(3) * (1 + error)}
        if missing:
            del other["b"]
        return check.agreement([Fake(other)], reference)
    finally:
        sys.path.remove(str(BENCHMARKS))


class Fake:
    """A contender with given gradients and a loss of 2."""

    name = "a fake"

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self._gradients = gradients

    def compute(self) -> None: ...

    def update(self) -> None: ...

    def forget(self) -> None: ...

    def loss(self) -> Tensor:
        return torch.tensor(2.0)

    def gradients(self) -> Mapping[str, Tensor]:
        return self._gradients


def test_a_contender_with_other_gradients_or_without_some_is_refused(pool) -> None:  # type: ignore[no-untyped-def]
    assert pool.run(1, agree, 0.0, False) == [{"a fake": {"loss": 0.0, "gradients": 0.0}}]
    for error, missing in ((1e-3, False), (float("nan"), False), (0.0, True)):
        with pytest.raises(ValueError, match="a fake does not compute what one process does"):
            pool.run(1, agree, error, missing)


def test_a_ratio_is_the_median_of_the_rounds_ratios(load) -> None:  # type: ignore[no-untyped-def]
    report: ModuleType = load("report")
    assert report.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == 1.0
    assert report.ratio([1.0, 20.0, 9.0], [2.0, 10.0, 3.0]) == 2.0


def test_the_ideal_has_the_bubble_of_each_schedule(load) -> None:  # type: ignore[no-untyped-def]
    ideal = load("pipeline").ideal
    assert ideal("1f1b", 2, 8) == pytest.approx((1 + 1 / 8) / 2)
    assert ideal("interleaved", 2, 8) == pytest.approx((1 + 1 / 16) / 2)
    assert ideal("zbh1", 2, 8) == pytest.approx((1 + 1 / 24) / 2)


def test_microbatches_of_unequal_size_are_refused(load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="--batch 8 must be a multiple of --microbatches 3"):
        load("workload").Workload(microbatches=3)
