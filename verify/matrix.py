"""What the matrix of models, heads and layouts proved when it last ran. Running it is tests/models."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Outcomes = Mapping[
    str, Mapping[str, bool]
]  # by head and layout: whether the layout trained as one process does


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model type's part of the matrix.

    Args:
        model_type: `config.model_type` of transformers.
        heads: those that were tried.
        cells: by layout, for how many heads it was tried, and for how many it agreed.
    """

    model_type: str
    heads: tuple[str, ...]
    cells: Mapping[str, tuple[int, int]]

    def cell(self, layout: str) -> str:
        """What a table says of a layout: yes, for some heads, no, or nothing where it was not tried."""
        tried, agreed = self.cells.get(layout, (0, 0))
        if not tried:
            return ""
        return "yes" if tried == agreed else f"{agreed} of {tried}" if agreed else "no"


def kept_matrix() -> dict[str, Any]:
    """What the file of the last results holds: versions, and outcomes by model type, head and layout."""
    found: dict[str, Any] = json.loads((files(__package__) / "matrix.json").read_text())
    return found


def rows_of(outcomes: Mapping[str, Outcomes]) -> list[ModelRow]:
    """A row for each model type, in alphabetical order."""
    return [_row(model_type, outcomes[model_type]) for model_type in sorted(outcomes)]


def layouts_of(rows: Sequence[ModelRow]) -> list[str]:
    """The layouts that any row has, those of most rows first."""
    counts: dict[str, int] = {}
    for row in rows:
        for layout in row.cells:
            counts[layout] = counts.get(layout, 0) + 1
    return sorted(counts, key=lambda layout: (-counts[layout], len(layout), layout))


def _row(model_type: str, of_heads: Outcomes) -> ModelRow:
    layouts = dict.fromkeys(layout for outcomes in of_heads.values() for layout in outcomes)
    found = {
        layout: [outcomes[layout] for outcomes in of_heads.values() if layout in outcomes]
        for layout in layouts
    }
    return ModelRow(
        model_type=model_type,
        heads=tuple(sorted(of_heads)),
        cells={layout: (len(each), sum(each)) for layout, each in found.items()},
    )
