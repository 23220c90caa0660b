"""Dumps of torch's flight recorder are read: recorded over gloo by torch 2.13, and one by the form that NCCL writes.

`recorded/` was written by two processes with a group "tp" of both, which called `all_reduce` twice; then, in "missing",
rank 0 alone a third time, and in "other" rank 0 `all_reduce` and rank 1 `all_gather_into_tensor`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.cluster.flight_recorder import explain_dumps, read_dumps

RECORDED = Path(__file__).parent / "recorded"


def test_a_rank_that_does_not_join_is_named() -> None:
    assert explain_dumps(read_dumps(RECORDED / "missing")) == [
        "rank 1 never made all_reduce number 3 of tp, but rank 0 did: all_reduce of float[4, 8] (scheduled, "
        "record.py:11)",
        "rank 0 waits in tp (number 3): all_reduce of float[4, 8] (scheduled, record.py:11)",
        "rank 1 waits in no collective; its last was all_reduce of float[4, 8] (completed, record.py:9)",
    ]


def test_two_collectives_in_one_place_are_named() -> None:
    first, *_ = explain_dumps(read_dumps(RECORDED / "other"))
    assert first == (
        "ranks made different calls as number 3 of tp: rank 0: all_reduce of float[4, 8]; rank 1: all_gather of "
        "float[4, 8]"
    )


def entry(number: int, sizes: list[list[int]], state: str, **values: Any) -> dict[str, Any]:
    """Return an entry as torch writes it for NCCL."""
    return {
        "pg_id": 1,
        "process_group": ("2", "mesh_dp"),
        "profiling_name": "nccl:all_reduce",
        "record_id": number,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "input_sizes": sizes,
        "input_dtypes": ["BFloat16"],
        "output_sizes": sizes,
        "output_dtypes": ["BFloat16"],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "frames": [],
        **values,
    }


SENT = {"is_p2p": True, "profiling_name": "nccl:send 0->1"}


def test_other_sizes_are_named_and_a_buffer_may_have_lost_its_oldest_entries(tmp_path: Path) -> None:
    dumps = {
        0: [entry(7, [[4]], "completed"), entry(8, [[4, 8]], "started")],
        1: [entry(8, [[4, 9]], "started"), entry(1, [[3]], "scheduled", **SENT)],
    }
    for rank, entries in dumps.items():
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps({"version": "2.10", "entries": entries}))
    result = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert result.output.splitlines() == [
        "ranks made different calls as number 8 of dp: rank 0: all_reduce of bfloat16[4, 8]; rank 1: all_reduce of "
        "bfloat16[4, 9]",
        "rank 0 waits in dp (number 8): all_reduce of bfloat16[4, 8] (started)",
        "rank 1 waits in dp (number 8): all_reduce of bfloat16[4, 9] (started)",
        "rank 1 waits in dp (number 0): send 0->1 of bfloat16[3] (scheduled)",
    ]


@pytest.mark.parametrize("content", ["", "no dump", "{}"])
def test_a_folder_without_dumps_and_a_file_that_is_none_are_refused(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / "trace_0").write_text(content)
    result = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 2
    assert ("is no dump" if content else "has no dumps") in result.output


def test_a_number_that_no_dump_has_is_passed_over_and_a_torn_entry_is_no_dump(tmp_path: Path) -> None:
    for rank, numbers in enumerate(((1, 3, 4), (1, 3))):
        entries = [entry(number, [[4]], "completed") for number in numbers]
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps({"entries": entries}))
    assert explain_dumps(read_dumps(tmp_path))[0].startswith("rank 1 never made all_reduce number 4 of dp")
    (tmp_path / "trace_2.json").write_text(json.dumps({"entries": [{"record_id": 1}]}))
    with pytest.raises(ValueError, match=r"trace_2\.json is no dump of torch's flight recorder"):
        read_dumps(tmp_path)
