"""`make gpu` without a GPU: results with which a later run continues, rows that end their process, staging."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.collectives import all_gather_single
from echelon.shardformer.layers.attention_kernels import KERNELS
from echelon.verify.parity import Report

from ..pool import Pool
from ..test_project import imports
from . import __main__ as runner
from . import speed, table
from .alone import documented_reads
from .kernels import attention_rows, flex_attention, require_available, ring_rows
from .ranks import rows
from .results import FAILED, PASSED, ROOT, UNAVAILABLE, Results, Row, Unavailable, run_rows
from .speed import WORKS
from .staging import staging


def fails() -> Row:
    raise ValueError("no such kernel")


def is_unavailable() -> Row:
    raise Unavailable("peft is not installed")


ROWS = {
    "agrees": lambda: {"loss": 1.0},
    "departs": lambda: {"departure": "loss is off"},
    "fails": fails,
    "is unavailable": is_unavailable,
    "measures": lambda: {"figures": {"tokens/s": 7}},
    "measures more": lambda: {"figures": {"step, ms": 2, "tokens/s": 9}},
    "measures something else": lambda: {"figures": {"saved, GiB": 4}},
}


MACHINE = ("sources", "num_devices", "torch", "transformers")


def test_failed_rows_are_reported_and_the_rest_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "alone.json", "alone")
    assert run_rows(results, ROWS, seconds=60)
    states = {name: row["state"] for name, row in results.rows.items()}
    assert list(states.values()) == [PASSED, FAILED, FAILED, UNAVAILABLE, *[PASSED] * 3]
    assert "ValueError: no such kernel" in results.rows["fails"]["error"]
    text = table.tables([json.loads((tmp_path / "alone.json").read_text())])
    assert "| alone | 4 | 2 | 1 | 0 |" in text and "- alone, departs: loss is off" in text
    assert "- alone, unavailable: peft is not installed (is unavailable)" in text
    assert "| measures | 7 |  |\n| measures more | 9 | 2 |\n\n" in text
    assert "| measures something else | 4 |" in text


def test_a_later_run_continues_and_other_sources_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alone.json"
    assert not run_rows(Results(path, "alone"), ROWS, seconds=-1.0)
    run_rows(Results(path, "alone"), {"agrees": ROWS["agrees"]}, seconds=60)
    assert Results(path, "alone").left(["agrees", "departs"]) == ["departs"]
    monkeypatch.setattr("tests.gpu.results.sources", lambda: "others")
    assert Results(path, "alone").left(["agrees", "departs"]) == ["agrees", "departs"]


def test_an_interrupted_row_has_failed_unless_it_had_just_begun(tmp_path: Path) -> None:
    results = Results(tmp_path / "alone.json", "alone")
    results.begin("hangs")
    runner.settle(results, "it hung", least_seconds=60.0)
    assert results.rows == {}
    results.begin("hangs")
    runner.settle(results, "it hung")
    assert results.rows["hangs"] == {"state": FAILED, "error": "it hung"}


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("pass", 0),
        ("import os, sys, time; os.environ['RANK'] == '1' and sys.exit('rank 1: broke'); time.sleep(60)", 1),
        ("import time; time.sleep(60)", None),
    ],
)
def test_processes_are_ended_if_one_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: int | None
) -> None:
    monkeypatch.setattr(runner, "MOURNING", 0.0)
    log = tmp_path / "log"
    seconds = 2.0 if status is None else 30.0
    assert runner.run_processes([sys.executable, "-c", script], 2, log, seconds=seconds) == status
    assert runner.last_lines(log) == ("rank 1: broke" if status else "")


@pytest.mark.parametrize(
    ("script", "name", "why"),
    [
        ("import xxx_hash", runner.START, "No module named 'xxx_hash'"),
        (
            "import faulthandler, json, os, sys, time; faulthandler.enable(); path = sys.argv[1]\n"
            "known = json.load(open(path)); known['rows']['hangs'] = {'state': 'running', 'begun': time.time() - 101}\n"
            "open(path + '.new', 'w').write(json.dumps(known)); os.replace(path + '.new', path); time.sleep(60)",
            "hangs",
            'it hung; File "<string>", line 3',
        ),
    ],
)
def test_a_part_that_cannot_start_or_whose_row_hangs_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str, why: str
) -> None:
    path = tmp_path / "many.json"
    Results(path, "many").put("known", PASSED)
    begin = runner.run_processes
    command = [sys.executable, "-c", script, str(path)]
    monkeypatch.setattr(runner, "run_processes", lambda _, *rest, **more: begin(command, *rest, **more))
    monkeypatch.setattr(runner, "STACKS", 0.5)
    monkeypatch.setattr(runner, "MOST_STARTS", 1)
    begun = time.monotonic()
    assert not runner.run_leg("many", tmp_path, seconds=30)
    assert time.monotonic() - begun < 25  # no longer than allowed
    assert why in Results(path, "many").rows[name]["error"]


def test_rows_that_had_just_begun_are_tried_again_once_the_command_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*_: object, **__: object) -> int:
        Results(tmp_path / "many.json", "many").begin("a row")
        raise SystemExit(1)

    monkeypatch.setattr(runner, "run_processes", broken_off)
    with pytest.raises(SystemExit):
        runner.run_leg("many", tmp_path, seconds=30)
    assert Results(tmp_path / "many.json", "many").rows == {}


def test_tables_are_written_even_if_the_page_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpu = {"device": "a GPU", **dict.fromkeys(MACHINE, 1)}
    monkeypatch.setattr("tests.gpu.results.measured_on", lambda: on_gpu)
    run_rows(Results(tmp_path / "alone.json", "alone"), {"agrees": ROWS["agrees"]}, seconds=60)
    page = tmp_path / "page.md"
    page.mkdir()
    monkeypatch.setattr(table, "PAGE", page)
    assert table.write_tables(tmp_path) == 0
    assert "stays as it is" in capsys.readouterr().out


def staged() -> list[bool]:
    """Return the properties of `staging` that hold, on one rank of two."""
    rank, properties = dist.get_rank(), []
    with staging("cpu"):
        total = torch.full((3,), float(rank + 1))
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        properties.append(bool(total.isnan().all()))
        work.wait()
        properties.append(total.tolist() == [3.0] * 3)
        gathered = torch.arange(4.0) + 10 * rank
        work = all_gather_single(gathered, gathered.chunk(2)[rank], async_op=True)
        properties.append(gathered.isnan().tolist() == [rank == 1, rank == 1, rank == 0, rank == 0])
        work.wait()
        properties.append(gathered.tolist() == [0.0, 1.0, 12.0, 13.0])
        sent, arriving = torch.tensor([rank]), torch.zeros(1, dtype=torch.int64)
        works = [dist.isend(sent, 1 - rank), dist.irecv(arriving, 1 - rank)]
        properties.append(arriving.item() == -1)
        for transfer in works:
            assert transfer is not None
            transfer.wait()
        properties.append(arriving.item() == 1 - rank)
        objects = [None, None]
        dist.all_gather_object(objects, rank)
        properties.append(objects == [0, 1])
    return properties


def test_staged_outputs_are_nan_until_wait(pool: Pool) -> None:
    assert pool.run(2, staged) == [[True] * 7] * 2


def compared() -> Report:
    with staging("cpu"):
        return rows(2)["training_plain-dp2·fp32-2layers-1microbatches"].compare()


def test_a_row_of_parity_agrees_under_staging(pool: Pool) -> None:
    assert [report.departure for report in pool.run(2, compared)] == [None, None]


def test_missing_kernels_are_unavailable_and_never_pass() -> None:
    by_kernel = {row.layout.arguments["enable_flash_attention"]: row for row in attention_rows().values()}
    assert by_kernel.keys() == KERNELS.keys()
    for name, row in by_kernel.items():
        with pytest.raises(Unavailable, match=name) if KERNELS[name].needs_cuda else nullcontext():
            require_available(row.layout.arguments)


def test_a_ring_without_flex_attention_fails() -> None:
    assert {row.missing for row in ring_rows()} == {"FlexAttention trains on CUDA alone, with triton"}
    with pytest.raises(AssertionError, match="other kernels computed"), flex_attention():
        pass


def test_the_parts_have_rows_and_end_within_nine_minutes() -> None:
    assert sum(part.seconds for part in runner.PARTS.values()) <= runner.SECONDS
    assert runner.SECONDS + runner.PATIENCE < 9 * 60
    sizes = [part.num_ranks for part in runner.PARTS.values() if part.num_ranks]
    assert sizes == [2, 4, 8] and all(rows(size) for size in sizes)


def test_the_last_line_of_a_benchmark_is_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os; print(os.environ['NAME']); print('step_ms=1.5 ratio_to_dtensor=-2')"
    monkeypatch.setattr(speed, "HOST_TIME", ("-c", script))
    assert speed.host_time(NAME="here") == {"figures": {"step_ms": 1.5, "ratio_to_dtensor": -2.0}}
    with pytest.raises(RuntimeError, match="KeyError: 'NAME'"):
        speed.host_time(OTHER="here")


def imported(path: Path) -> Iterator[str]:
    """Yield the imported modules of a file, by their dotted names in the repository, or the bare ones of benchmarks."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for _, relative, name in imports(path.read_text(), module):
        yield name if relative else name.split(".")[0]


def test_no_optional_package_is_imported() -> None:
    seen: set[Path] = set()
    todo = [path for path in (ROOT / "tests" / "gpu").glob("*.py") if path != Path(__file__)]
    todo.append(ROOT / speed.HOST_TIME[0])
    foreign = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported(path):
            near = [path.parent / f"{name}.py"] if path.parent.name == "benchmarks" else []
            near += [ROOT / f"{module.replace('.', '/')}.py" for module in (name, name.rpartition(".")[0])]
            todo += [file for file in near if file.exists() and {"tests", "benchmarks"} & {*file.parts}]
            if not any(file.exists() for file in near) and not name.startswith("tests"):
                foreign.add(name.split(".")[0])
    # peft, liger_kernel: rows without them are unavailable. matplotlib: for benchmarks that draw. safetensors comes
    # with transformers, numpy with both.
    allowed = {
        "torch",
        "transformers",
        "echelon",
        "numpy",
        "safetensors",
        "peft",
        "liger_kernel",
        "matplotlib",
    }
    assert foreign - sys.stdlib_module_names <= allowed
    assert len(seen) > 30


def test_host_reads_and_operations_equal_those_of_the_pages() -> None:
    for ring, reads in ((False, 0), (True, 2)):
        documented = documented_reads({"m": 2, "padded": True, "ring_attn": ring, "offload": False})
        assert documented["zero/reduced_gradients.py measure"] == 1
        assert documented["sequence/block_mask.py __init__"] == reads
    work = WORKS["tiny"]
    assert work.tokens == 128
    assert work.operations(1000 + 256 * 64) == 128 * (6 * 1000 + 6 * 2 * 64 * 32)
