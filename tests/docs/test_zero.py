"""The guide to ZeRO: its picture says what its tables say, and what it points to exists."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "zero.md").read_text()


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/draw_zero.py, imported."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("draw_zero", DOCS / "draw_zero.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "draw_zero", module)  # dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def value(formula: str, num_ranks: int) -> float:
    """The bytes of a parameter: "6 Ψ + 12 Ψ/d" is 6 + 12 / d."""
    terms = re.findall(r"(\d+) Ψ(/d)?", formula)
    return sum(int(number) / (num_ranks if is_shared else 1) for number, is_shared in terms)


def test_the_picture_holds_what_the_formulas_say(drawing: ModuleType) -> None:
    for stage in drawing.STAGES:
        assert stage.bytes_held == value(stage.formula, drawing.NUM_RANKS), stage.name
        assert all(len(places) == len(drawing.KINDS) for places in stage.places)


def test_the_picture_and_the_table_have_the_same_formulas(drawing: ModuleType) -> None:
    rows = re.findall(r"^\| (stage \d) \| [^|]* \| ([^|]*?)( \+ buckets)? \|$", TEXT, flags=re.M)
    assert [
        (name, formula) for name, formula, _ in rows[:3]
    ] == [  # the first table; another is of cpu_offload
        (stage.name, stage.formula) for stage in drawing.STAGES if stage.name != "FSDP"
    ]


def test_the_picture_is_the_drawing(drawing: ModuleType) -> None:
    written = (DOCS / "images" / "zero.svg").read_text()
    told = [stage.formula for stage in drawing.STAGES] + [
        f"= {each.bytes_held:g} Ψ" for each in drawing.STAGES
    ]
    told += [text for stage in drawing.STAGES for text in stage.traffic] + [*drawing.PHASES, *drawing.KINDS]
    assert [text for text in told if text not in written] == []


def test_what_the_guide_points_to_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert {"images/zero.svg", "images/zero_curves.svg"} <= set(targets)
    assert [target for target in targets if not (DOCS / target).exists()] == []
