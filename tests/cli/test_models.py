"""`echelon models`: the matrix of the last results, and the page that is made from it."""

from pathlib import Path

from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.cli.models import page
from echelon.shardformer import model_types
from echelon.verify.matrix import FEATURES, kept_matrix, layouts_of, rows_of

from ..models.test_matrix import LAYOUTS, choices

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Of another library: the matrix is of transformers' own types.
ELSEWHERE = {"chatglm"}


def test_the_page_of_the_docs_is_made_from_the_kept_results() -> None:
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
    assert page({"rows": {"llama": outcomes["b"]}, "torch": "1", "transformers": "2"}).splitlines()[-1] == (
        f"| llama | table | causal | {empty}no |"
    )


def test_a_feature_is_proven_refused_with_its_reason_or_not_tried() -> None:
    kept = {
        "rows": {"llama": {"causal": {"tp2·fp32": True, "pp2·fp32": False}}},
        "features": {
            "llama": {"flash attention": "yes", "xFormers": "no", "fused norm": "refused: it has none"},
            "bert": {"fused norm": "refused: it has none"},
        },
        "torch": "1",
        "transformers": "2",
    }
    lines = page(kept).splitlines()
    assert "| llama | table | causal | yes | no |  | yes | no |  | – |  |  |  |  |" in lines
    assert "| bert | table |  |  |  |  |  |  |  | – |  |  |  |  |" in lines
    assert lines[-1] == "- fused norm: bert, llama: it has none."


def test_layouts_that_spread_sequences_are_counted_by_mode() -> None:
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


def test_the_command_prints_a_row_for_each_type() -> None:
    result = CliRunner().invoke(app, ["models"])
    assert result.exit_code == 0
    assert all(f" {model_type} " in result.output for model_type in set(model_types()) - ELSEWHERE)


def test_the_command_prints_the_page() -> None:
    result = CliRunner().invoke(app, ["models", "--markdown"])
    assert (result.exit_code, result.output) == (0, page(kept_matrix()))
