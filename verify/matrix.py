"""What the matrix of models, heads, layouts and features proved when it last ran. Running it is tests/contract."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Outcomes = Mapping[
    str, Mapping[str, bool]
]  # by head and layout: whether the layout trained as one process does

SEQUENCE_MODES = ("split_gather", "ring", "all_to_all", "ring_attn")
# What a model can be trained with besides a layout, in the words of the matrix.
FEATURES = (
    *("lazy initialization", "flash attention", "xFormers", "fused operators", "fused norm"),
    *SEQUENCE_MODES,
)
PASSED, FAILED, REFUSED = "yes", "no", "refused: "  # the last with the reason behind it


@dataclass(frozen=True, kw_only=True)
class FeatureCase:
    """What a test of one feature on one model type is given, by which its result is known.

    Args:
        model_type: `config.model_type` of transformers.
        feature: one of FEATURES.
    """

    model_type: str
    feature: str

    def __post_init__(self) -> None:
        if self.feature not in FEATURES:
            raise ValueError(f"feature={self.feature!r} must be one of {', '.join(FEATURES)}")


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model type's part of the matrix.

    Args:
        model_type: `config.model_type` of transformers.
        heads: those that were tried.
        cells: by layout, for how many heads it was tried, and for how many it agreed.
        features: by feature, PASSED, FAILED, or REFUSED and the reason.
        source: "table" where Echelon has a table of it, "plan" where it is derived from transformers' own.
    """

    model_type: str
    heads: tuple[str, ...]
    cells: Mapping[str, tuple[int, int]]
    features: Mapping[str, str]
    source: str

    def cell(self, layout: str) -> str:
        """What a table says of a layout: yes, for some heads, no, or nothing where it was not tried."""
        tried, agreed = self.cells.get(layout, (0, 0))
        if not tried:
            return ""
        return "yes" if tried == agreed else f"{agreed} of {tried}" if agreed else "no"

    def feature_cell(self, feature: str) -> str:
        """What a table says of a feature: yes, no, a dash where it is refused, or nothing where it was not tried."""
        outcome = self.features.get(feature, "")
        return "–" if outcome.startswith(REFUSED) else outcome


def kept_matrix() -> dict[str, Any]:
    """What the file of the last results holds: versions, and outcomes by model type, head and layout.

    Under "features" those by model type and feature, under "tables" the model types that have a table.
    """
    found: dict[str, Any] = json.loads((files(__package__) / "matrix.json").read_text())
    return found


def rows_of(kept: Mapping[str, Any]) -> list[ModelRow]:
    """A row for each model type of what `kept_matrix` gives, in alphabetical order."""
    outcomes: Mapping[str, Outcomes] = kept["rows"]
    features: Mapping[str, Mapping[str, str]] = kept.get("features", {})
    tables: Sequence[str] = kept.get("tables", ())
    return [
        _row(
            model_type,
            outcomes.get(model_type, {}),
            features.get(model_type, {}),
            source="table" if model_type in tables else "plan",
        )
        for model_type in sorted({*outcomes, *features})
    ]


def refusals(rows: Sequence[ModelRow]) -> dict[tuple[str, str], list[str]]:
    """The model types that refuse a feature for a reason, by both."""
    found: dict[tuple[str, str], list[str]] = {}
    for feature in FEATURES:
        for row in rows:
            if row.feature_cell(feature) == "–":
                reason = row.features[feature].removeprefix(REFUSED)
                found.setdefault((feature, reason), []).append(row.model_type)
    return found


def layouts_of(rows: Sequence[ModelRow]) -> list[str]:
    """The layouts that any row has, those of most rows first."""
    counts: dict[str, int] = {}
    for row in rows:
        for layout in row.cells:
            counts[layout] = counts.get(layout, 0) + 1
    return sorted(counts, key=lambda layout: (-counts[layout], len(layout), layout))


def _row(model_type: str, of_heads: Outcomes, features: Mapping[str, str], *, source: str) -> ModelRow:
    layouts = dict.fromkeys(layout for outcomes in of_heads.values() for layout in outcomes)
    found = {
        layout: [outcomes[layout] for outcomes in of_heads.values() if layout in outcomes]
        for layout in layouts
    }
    return ModelRow(
        model_type=model_type,
        heads=tuple(sorted(of_heads)),
        cells={layout: (len(each), sum(each)) for layout, each in found.items()},
        features=features,
        source=source,
    )
