"""The benchmark of checkpoints: that it runs, what it writes, and that it compares the same bytes."""

import json
import re
from pathlib import Path

import pytest


@pytest.mark.slow
def test_both_ways_save_the_same_bytes_and_all_of_it_is_reported(run_quickly, load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    times, folder = tmp_path / "times.json", tmp_path / "saved"
    folder.mkdir()
    sizes = ("--hidden", "128", "--vocabulary", "2048", "--layers", "4")
    printed = run_quickly("checkpoint.py", *sizes, "--json", str(times), "--folder", str(folder))

    names = [f"{name}_to_plain" for name in ("saved", "stall", "slower_steps")]
    assert re.fullmatch(" ".join(rf"{name}=\d+\.\d{{3}}" for name in names), printed.splitlines()[-1])
    assert list(folder.iterdir()) == []
    found = json.loads(times.read_text())["layouts"]
    assert found.keys() == load("checkpoint").LAYOUTS.keys()
    for each in found.values():
        assert all(len(each[name]) == 3 for name in ("plain", "saved", "stall", "slower steps", "until done"))
        assert min(each["plain"] + each["saved"] + each["stall"]) > 0
        # Weights and two states in float32; indices and archives add little.
        expected = 3 * 4 * (2 * 2048 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 352 + 2 * 128) + 128)
        assert all(expected <= size <= 1.1 * expected for size in each["bytes"].values())
