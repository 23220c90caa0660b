"""`echelon models`: the matrix of the last results, and the page made from it."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.models import FEATURES, SHORT, kept_matrix, layouts_of, page, rows_of
from echelon.shardformer import model_types

from ..contract.matrix_rows import LAYOUTS, choices
from ..matrix import complete_parts, make_page, types_with_a_table
from .calls import call, cells, require_refused

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# A type of another library: the matrix has transformers' own types.
ELSEWHERE = {"chatglm"}


def test_the_page_of_the_docs_is_made_from_the_kept_results() -> None:
    assert call("models --markdown") == (0, PAGE.read_text())
    assert PAGE.read_text() == page(kept_matrix())


def test_every_type_with_a_table_was_tried_with_all_heads_under_all_layouts() -> None:
    rows = kept_matrix()["rows"]
    for model_type in set(model_types()) - ELSEWHERE:
        for choice in choices(model_type):
            head = choice.described_head
            assert set(map(str, LAYOUTS)) <= rows[model_type][head].keys(), f"{model_type}, {head}"


def test_a_cell_says_for_how_many_heads_a_layout_agrees() -> None:
    outcomes = {
        "a": {
            "causal": {"tp2": True, "pp2": False},
            "token": {"tp2": True, "pp2": True},
            "base": {"dp2": False},
        },
        "b": {"causal": {"tp2": False}},
    }
    first, second = rows = rows_of({"rows": outcomes})
    assert layouts_of(rows) == ["tp2", "dp2", "pp2"]
    assert [first.cell(layout) for layout in ("tp2", "pp2", "dp2", "tp4")] == ["yes", "1 of 2", "no", ""]
    assert (second.heads, second.cell("tp2"), second.cell("pp2")) == (("causal",), "no", "")
    empty = " | " * (2 + len(FEATURES))  # no layout here is one of the axes
    text = page({"rows": outcomes, "torch": "1", "transformers": "2"})
    assert f"| a | plan | base; causal; token | {empty}yes | no | 1 of 2 |" in text
    assert page(
        {"rows": {"llama": outcomes["b"]}, "tables": ["llama"], "torch": "1", "transformers": "2"}
    ).splitlines()[-1] == (f"| llama | table | causal | {empty}no |")


def test_a_feature_is_proven_refused_with_its_reason_or_not_tried() -> None:
    kept = {
        "rows": {"llama": {"causal": {"tp2·fp32": True, "pp2·fp32": False}}},
        "features": {
            "llama": {"flash attention": "yes", "xFormers": "no", "fused norm": "refused: it has none"},
            "bert": {"fused norm": "refused: it has none"},
        },
        "tables": ["bert", "llama"],
        "torch": "1",
        "transformers": "2",
    }
    lines = page(kept).splitlines()
    assert "| llama | table | causal | yes | no |  | yes | no |  | – |  |  |  |  |" in lines
    assert "| bert | table |  |  |  |  |  |  |  | – |  |  |  |  |" in lines
    assert lines[-1] == "- fused norm: bert, llama: it has none."


def test_layouts_that_shard_sequences_are_counted_by_mode() -> None:
    outcomes = {
        "tp2·ring·fp32": True,
        "tp4·ring·fp32": False,
        "sp2·ring_attn·fp32": True,
        "sp2·wp2·all_to_all·fp32": True,
    }
    kept = {"rows": {"llama": {"causal": outcomes}, "bert": {}}, "torch": "1", "transformers": "2"}
    lines = page(kept).splitlines()
    assert lines[-1] == "| llama |  | 1 of 2 |  | 1 of 1 | 1 of 1 |"
    assert not any("ring·" in line for line in lines)


def on_a_terminal(*arguments: str, columns: int) -> list[str]:
    """Return the lines that `echelon models` prints on a terminal of this width."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", "from echelon.cli import main; main()", "models", *arguments]
    others = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdout=terminal, env=others | {"TERM": "xterm"})
    os.close(terminal)
    printed = b""
    with open(master, "rb", buffering=0) as reader, suppress(OSError):  # raised for a closed terminal
        while chunk := reader.read(2**16):
            printed += chunk
    assert process.wait() == 0
    return printed.decode().splitlines()


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_of_80_columns_shows_a_line_for_each_type_and_a_legend(columns: int) -> None:
    rows = rows_of(kept_matrix())
    heading, *lines = on_a_terminal(columns=columns)
    assert heading.split() == ["model", "type", "by", "hd", *SHORT, "more"]
    assert [line.split()[0] for line in lines[: len(rows)]] == [row.model_type for row in rows]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert "llama            table 6  yes yes yes  yes yes –   yes  yes yes  yes yes 47/47" in lines
    explained = " ".join(lines[len(rows) + 1 :])
    for short, long in SHORT.items():
        assert short in explained.split() and long in explained


def test_a_pipe_gets_the_page() -> None:
    assert call("models") == (0, PAGE.read_text())


def test_the_results_are_read_under_a_locale_without_utf8() -> None:
    code = "from echelon.cli.models import kept_matrix; print(len(kept_matrix()['rows']))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert printed.stdout == f"{len(kept_matrix()['rows'])}\n", printed.stderr[-500:]


def test_types_are_shown_by_name_or_by_its_beginning() -> None:
    status, output = call("models bloom")
    assert status == 0 and "bloom, sharded by a table: " in output
    rows = cells(output)
    assert rows[0][0] == "heads" and rows[0][1].startswith("base; causal; causal, tied;")
    reasons = [name for outcome, name in rows if outcome == "–"]
    assert any(
        reason.startswith("xFormers: BloomForCausalLM has the attention that was chosen when it was built")
        for reason in reasons
    )
    assert ["6/6", "tp2·pp2"] in rows
    _, several = call("models GPT_")
    titles = [line.split(",")[0] for line in several.splitlines() if "sharded by" in line]
    assert titles == ["gpt_neo", "gpt_neox"]


def part(number: int, count: int, commit: str = "abc", **rows: bool) -> dict[str, Any]:
    """Return the results of one part: outcomes by layout, all for one model and head."""
    return {
        "part": [number, count],
        "commit": commit,
        "torch": "1",
        "transformers": "2",
        "tables": ["llama"],
        "rows": {"llama": {"causal": rows}},
        "features": {},
    }


def test_parts_are_complete_only_where_all_are_of_one_commit() -> None:
    first, second = part(1, 2), part(2, 2)
    assert complete_parts([first]) == []
    assert complete_parts([first, part(2, 2, "abd"), part(2, 3)]) == []
    assert complete_parts([part(1, 2, "abd"), first, second, part(2, 3)]) == [first, second]


def test_the_page_is_made_once_all_parts_are_there_and_says_which_cells_are_of_other_commits(
    tmp_path: Path,
) -> None:
    results, matrix, document = tmp_path / "results", tmp_path / "matrix.json", tmp_path / "models.md"
    results.mkdir()
    before = {"rows": {"llama": {"causal": {"tp2": False, "pp2": True, "tp4": True}}}, "commit": "aaa"}
    matrix.write_text(json.dumps(before | {"others": {"llama causal tp4": "000"}}))
    document.write_text("before")
    (results / "1-of-2.json").write_text(json.dumps(part(1, 2, tp2=True)))
    assert "until all parts of one commit are there: 1-of-2 (abc)" in make_page(results, matrix, document)
    assert document.read_text() == "before"
    (results / "2-of-2.json").write_text(json.dumps(part(2, 2, dp2=False, dp4=True)))
    assert "is made from 2 parts of commit abc" in make_page(results, matrix, document)
    assert list(results.iterdir()) == []
    kept = json.loads(matrix.read_text())
    assert kept["rows"] == {
        "llama": {"causal": {"tp2": True, "pp2": True, "tp4": True, "dp2": False, "dp4": True}}
    }
    assert kept["others"] == {"llama causal pp2": "aaa", "llama causal tp4": "000"}
    assert document.read_text() == page(kept)
    assert document.read_text().endswith("| 000 | llama | causal tp4 |\n| aaa | llama | causal pp2 |\n")
    assert "torch 1, transformers 2, commit abc." in document.read_text()
    (results / "1-of-1.json").write_text(json.dumps(part(1, 1, "abd", dp2=True)))
    make_page(results, matrix, document)  # with a repeated row
    kept = json.loads(matrix.read_text())
    assert kept["commit"] == "abc" and kept["others"]["llama causal dp2"] == "abd"


KEPT_ROWS = """
import pytest
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

LLAMA, BERT = ModelChoice(model_type="llama"), ModelChoice(model_type="bert")

@pytest.mark.parametrize(("choice", "layout"), [(LLAMA, Layout(tp=2)), (LLAMA, Layout(pp=2)), (BERT, Layout(tp=2))])
def test_a_row(choice, layout):
    assert choice.model_type == "llama" and layout.pp == 1

def test_no_row():
    pass
"""


@pytest.mark.slow
def test_a_part_of_a_run_keeps_the_rows_that_it_ran_in_other_processes(tmp_path: Path) -> None:
    (tmp_path / "test_rows.py").write_text(KEPT_ROWS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PART": "2/2", "KEEP_RESULTS": str(tmp_path / "results")}
    done = subprocess.run(command, env=environment, cwd=PAGE.parents[1], capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    (path,) = (tmp_path / "results").iterdir()
    kept = json.loads(path.read_text())
    assert (path.name, kept["part"]) == ("2-of-2.json", [2, 2])
    assert kept["rows"] == {"llama": {"causal": {"pp2·fp32": False}}}


def test_an_unknown_name_and_a_page_of_one_type_are_refused() -> None:
    near = "echelon models: no model type 'lama' was tried: did you mean llama or mllama or llama4? If not, "
    require_refused("models lama", near)
    unknown = "no model type 'zzz' was tried: give the `model_type` of its config.json. `echelon verify"
    require_refused("models zzz", unknown)
    require_refused(
        "models llama --markdown", "--markdown prints all types of docs/models.md: leave 'llama' out"
    )


def test_the_kept_results_know_the_types_that_have_a_table() -> None:
    assert kept_matrix()["tables"] == types_with_a_table()
