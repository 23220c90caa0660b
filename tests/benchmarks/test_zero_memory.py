"""The memory of data parallelism: that peaks are seen, and that other bytes than the formula's are told."""

import json
import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # see test_zero.py


@pytest.mark.slow
def test_contenders_are_measured_alone_and_hold_what_the_formula_says(run_quickly, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "memory.json"
    names = ["echelon stage 2", "torch DDP"]
    printed = run_quickly("zero_memory.py", "--contenders", *names, "--steps", "2", "--json", str(path))

    assert re.fullmatch(r"echelon_stage_2=\d+\.\d{3}", printed.splitlines()[-1])
    found = json.loads(path.read_text())["memory"]
    assert list(found) == names
    ours, ddp = found["echelon stage 2"], found["torch DDP"]
    assert ours["held"]["parameters"] == ddp["held"]["parameters"] == 2 * ours["held"]["gradients"]
    for each in (ours, ddp):
        assert len(each["peaks"]) == 2
        assert min(each["peaks"]) > sum(each["held"].values())


def test_other_bytes_than_the_formulas_are_told(load) -> None:  # type: ignore[no-untyped-def]
    memory = load("memory")
    assert memory.held_at_stage(2, elements=100, num_ranks=2) == {
        "parameters": 400,
        "gradients": 200,
        "masters": 0,
        "states": 400,
    }
    expected = memory.held_at_stage(1, elements=100, num_ranks=2)
    memory.require_held("a stage", expected | {"buffers": 7}, expected, padding=0)
    memory.require_held("a stage", expected | {"states": 408}, expected, padding=1)
    for wrong in ({"gradients": 200}, {"states": 408}, {"masters": 400}):
        with pytest.raises(ValueError, match=f"a stage holds .* bytes of {next(iter(wrong))} instead of"):
            memory.require_held("a stage", expected | wrong, expected, padding=0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
def test_a_peak_is_what_was_there_for_a_moment(load) -> None:  # type: ignore[no-untyped-def]
    meter = load("peak").Meter(torch.device("cpu"))
    size = 256 * 2**20
    large, small = meter.peak(lambda: torch.ones(size // 4).sum()), meter.peak(lambda: None)
    assert large - small == pytest.approx(size, rel=0.1)


def test_a_status_is_read_in_bytes(load) -> None:  # type: ignore[no-untyped-def]
    assert load("peak").status_bytes("Name:\tpython\nVmHWM:\t     512 kB\nVmRSS:\t 3 kB\n", "VmHWM") == 2**19


def test_ratios_are_to_the_smallest_peak_of_torch(load) -> None:  # type: ignore[no-untyped-def]
    to_best_peer = load("zero_memory").to_best_peer
    assert to_best_peer({"echelon stage 1": 3.0, "torch DDP": 4.0, "torch FSDP2": 2.0}) == {
        "echelon stage 1": 1.5
    }
    assert to_best_peer({"echelon stage 1": 3.0}) == {}
