"""Processes killed at any call that writes leave the checkpoint that was complete last, bit for bit."""

from pathlib import Path
from typing import get_args

import pytest

from . import crashes
from .forked import in_warm_process


def test_a_save_that_is_killed_leaves_what_was_complete(tmp_path: Path) -> None:
    in_warm_process(crashes.explore, tmp_path, "replacing", "quick", seconds=60)
    assert len(crashes.deaths_told(tmp_path)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(crashes.Kind))
def test_a_save_that_is_killed_anywhere_leaves_what_was_complete(tmp_path: Path, kind: crashes.Kind) -> None:
    in_warm_process(crashes.explore, tmp_path, kind, "all", seconds=270)
    calls = crashes.deaths_told(tmp_path)
    print(f"{kind}: killed at {len(calls)} calls")
    assert len(calls) >= (50 if kind in ("new", "replacing", "asynchronous") else 10)
    kinds = {call.split()[0] for call in calls}
    assert {"open", "write", "fsync", "mkdir"} <= kinds and kinds & {"rename", "replace"}
