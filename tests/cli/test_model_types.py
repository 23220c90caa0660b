"""`echelon models --all`: every model type of transformers, from the records of `make coverage`."""

import subprocess
import sys
from typing import Any

import pytest

from echelon.cli.model_types import (
    COLUMNS,
    LEGEND,
    NOT_BUILT,
    columns_of,
    family_rows,
    kept_coverage,
    reason_lines,
    type_lines,
    types_of,
)

from ..coverage.page import PAGE
from .calls import call
from .test_models import on_a_terminal

ABOUT = {"torch": "1", "transformers": "5.10.0"}


def plain(name: str, **settings: Any) -> dict[str, Any]:
    return {"type": name, "class": name.title(), "family": "causal LM", "trains": True, **ABOUT, **settings}


def tried(name: str, refused: dict[str, str] | None = None, **outcomes: str) -> dict[str, Any]:
    """Return a row of a record of parity: by layout, with "x" for the dot, an outcome and perhaps a reason."""
    layouts = []
    for layout, text in outcomes.items():
        outcome, _, why = text.partition(": ")
        layouts.append({"layout": layout.replace("x", "·"), "outcome": outcome, "why": why})
    return {"type": name, "parity": "agrees", "layouts": layouts, "refused": refused or {}, **ABOUT}


COVERAGE = {
    "rows": [
        plain("dense"),
        plain("mixture", family="other"),
        plain("net", convolutional=True),
        plain("odd", trains=False, reason="ImportError: Odd requires the timm library"),
        plain("slow"),
    ],
    "splits": [{"type": "dense", "split": "proposed", **ABOUT}],
    "stages": [{"type": "dense", "stages": "refused", **ABOUT}],
    "parity": [
        tried("dense", {"tp2·pp2": "both", "pp2": "no list"}, tp2xdp2xzero1="agrees"),
        tried("mixture", tp2xpp2="departs: loss", pp3="agrees"),
        {"type": "slow", "parity": "fails", "why": "a limit", **ABOUT},
    ],
    "five": [
        tried("dense", {"tp2": "of an older release"}) | {"transformers": "5.0.0"},
        tried("elsewhere", tp2="fails: a limit", pp2="agrees"),
    ],
    "sequences": [
        tried("dense", {"sp2·ring_attn": "its code"}, tp2xsplit_gather="agrees", dp2xzero2="agrees"),
        tried("net", {"tp2·split_gather": "no layers"}, dp2xzero2="agrees"),
    ],
    "heads": [
        tried("dense/token", tp2xpp2="agrees"),
        tried("dense/question", tp2xpp2="fails: no batch"),
    ],
}


def test_a_cell_is_of_the_outcome_that_decides() -> None:
    types = {model_type.name: model_type for model_type in types_of(COVERAGE)}
    cells = {name: [model_type.cell(column) for column in COLUMNS] for name, model_type in types.items()}
    assert [*COLUMNS] == ["TP", "PP", "split_gather", "ring", "all_to_all", "ring_attn", "ZeRO"]
    assert cells == {
        "dense": ["yes", "–", "yes", "", "", "–", "yes"],
        "elsewhere": ["err", "yes", "", "", "", "", ""],
        "mixture": ["no", "no", "", "", "", "", ""],
        "net": ["", "", "–", "", "", "", "yes"],
        "odd": [""] * 7,
        "slow": ["err", "err", "", "", "", "", ""],
    }
    assert [types[name].is_built for name in ("dense", "elsewhere", "odd", "slow")] == [
        True,
        True,
        False,
        True,
    ]
    assert (types["dense"].head_cell, types["dense"].sources) == ("1/2", {"splits": "proposed"})
    assert reason_lines(types_of(COVERAGE)) == [
        "- dense, PP refused: no list",
        "- dense, ring_attn refused: its code",
        "- elsewhere, TP fails: a limit",
        "- mixture, TP, PP departs: loss",
        "- net, split_gather refused: no layers",
        f"- odd {NOT_BUILT}: ImportError: Odd requires the timm library",
        "- slow, TP, PP fails: a limit",
    ]


def test_layouts_tell_about_axes_or_a_mode() -> None:
    assert columns_of("tp2·pp3·dp2·zero1") == ("TP", "PP", "ZeRO")
    assert columns_of("tp2·ring") == ("ring",)
    assert columns_of("sp2·all_to_all") == ("all_to_all",)


def test_families_are_counted_in_percent_of_the_types_that_were_tried() -> None:
    rows = {name: cells for name, *cells in family_rows(types_of(COVERAGE))}
    assert rows["causal LM"] == ["3", "2", "50%", "0%", "100%", "", "", "0%", "100%"]
    assert rows["convolutional"] == ["1", "1", "", "", "0%", "", "", "", "100%"]
    assert rows["all"] == ["5", "4", "25%", "25%", "100%", "", "", "0%", "100%"]
    assert [*rows] == ["family", "causal LM", "other", "all", "convolutional"]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_of_80_columns_shows_every_type_percentages_and_a_legend(columns: int) -> None:
    types = types_of(kept_coverage())
    lines = on_a_terminal("--all", columns=columns)
    assert lines[: len(types) + 2] == type_lines(types)
    assert max(map(len, lines)) <= 80
    assert lines[-len(LEGEND.splitlines()) - 1 : -1] == LEGEND.splitlines()
    assert not any(line.startswith("- ") for line in lines)
    assert any(line.startswith("mistral ") and line.split()[1:8] == ["yes"] * 7 for line in lines)


def test_a_pipe_gets_the_reasons_too_and_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom echelon.cli.main import app\n"
        "print(CliRunner().invoke(app, ['models', '--all']).output)\n"
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = printed.stdout.splitlines()
    types = types_of(kept_coverage())
    assert lines[: len(types) + 2] == type_lines(types)
    assert set(reason_lines(types)) <= set(lines) and lines[-1] == "set()"


def test_the_page_has_the_same_percentages() -> None:
    text = PAGE.read_text()
    for cells in family_rows(types_of(kept_coverage())):
        assert f"| {' | '.join(cells)} |\n" in text


def test_a_type_that_only_this_record_knows_is_shown_by_its_name_or_class() -> None:
    for arguments in ("apertus --all", "biogpt", "BioGptForCausalLM"):
        status, output = call(f"models {arguments}")
        assert status == 0 and "layers sharded: " in output, output
        assert "tp2·pp2" in output and "gives the full reason" in output
    _, output = call("models detr")
    assert f"{NOT_BUILT} │ ImportError" in output and "Not tried" not in output


def test_no_type_departs_from_one_process() -> None:
    """A departure is no cell of the page: its cause is mended, or it is refused.

    But for two by rounding, which the page explains: the same steps agree in float64.
    """
    departures = [
        (model_type.name, outcome.layout)
        for model_type in types_of(kept_coverage())
        for outcome in model_type.outcomes
        if outcome.outcome == "departs"
    ]
    assert departures == [("fun_asr_nano", "tp2·dp2·zero1"), ("owlv2", "sp2·ring_attn")]
