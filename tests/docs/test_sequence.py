"""The guide to long sequences: its pictures show what its orders say, and what it points to exists."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from echelon.shardformer.layers.sequence_axis import SequenceOrder

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "sequence.md").read_text()


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/draw_sequence.py, imported."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("draw_sequence", DOCS / "draw_sequence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "draw_sequence", module)  # dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("holds", "is_zigzag"), [("part", False), ("zigzag", True)])
def test_ranks_hold_in_the_pictures_what_they_hold(drawing: ModuleType, holds: str, is_zigzag: bool) -> None:
    num_ranks, length = drawing.NUM_RANKS, drawing.NUM_STRETCHES
    order = SequenceOrder(size=num_ranks, is_zigzag=is_zigzag)
    for rank in range(num_ranks):
        drawn = [
            position
            for patch in getattr(drawing, holds)(rank)
            for position in range(round(patch.top * length), round((patch.top + patch.height) * length))
        ]
        assert drawn == order.own(torch.arange(length), 0, rank).tolist()


def test_the_ring_computes_every_pair_once_and_as_many_on_each_rank(drawing: ModuleType) -> None:
    num_ranks, side = drawing.NUM_RANKS, drawing.NUM_STRETCHES
    by_rank = [
        [(round(each.top * side), round(each.left * side)) for each in drawing.keys_by_step(rank)]
        for rank in range(num_ranks)
    ]
    every = [pair for pairs in by_rank for pair in pairs]
    assert sorted(every) == [(query, key) for query in range(side) for key in range(query + 1)]
    assert len({len(pairs) for pairs in by_rank}) == 1
    for rank, pairs in enumerate(by_rank):
        own = [
            pair
            for pair, each in zip(pairs, drawing.keys_by_step(rank), strict=True)
            if each.colour == drawing.BLUE
        ]
        assert {key for _, key in own} == set(drawing.stretches(rank))  # the first step is at home


def test_the_pictures_are_the_drawings(drawing: ModuleType) -> None:
    for name, panels in drawing.PICTURES.items():
        written = (DOCS / "images" / f"sequence_{name}.svg").read_text()
        told = [panel.title for panel in panels] + [
            line for each in panels for line in each.sent.splitlines()
        ]
        assert [text for text in told if text not in written] == [], name
        assert f"images/sequence_{name}.svg" in TEXT


def test_what_the_guide_points_to_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert len(targets) >= 7
    assert [target for target in targets if not (DOCS / target).exists()] == []
