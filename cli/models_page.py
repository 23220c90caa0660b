"""docs/models.md: the last results of the parity check as a page of the documentation."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..verify.matrix import FEATURES, SEQUENCE_MODES, ModelRow, layouts_of, refusals, rows_of

SHARED_WEIGHTS = "shared-out weights"
AXES = {"tp2·fp32": "TP", "pp2·fp32": "PP"}
SPREAD = (*SEQUENCE_MODES, SHARED_WEIGHTS)


def page(kept: dict[str, Any]) -> str:
    """The matrix as a page of the documentation."""
    rows = rows_of(kept)
    columns = columns_of(rows)
    lines = [
        "# Models",
        "",
        "Made by `echelon models --markdown` from the last results of the tests (`make test-all`): do not edit.",
        "",
        f"{versions(kept)}.",
        "",
        '"yes": every head trains under the layout as in one process: loss, every gradient, the norm and every updated',
        "weight, over three AdamW steps with microbatches of unequal size, in fp32 where nothing else is said.",
        '"3 of 4": so many heads do. Nothing: not tried. By "table": `shardformer/tables`; by "plan": derived from',
        "transformers' own. TP and PP are two ranks of the one axis. Of a model made of several (BLIP-2, Gemma 3 with",
        "images) a pipeline cuts the language model alone; the others stand whole in front of it, on its first stage.",
        "",
        "Features are tried with the usual head, by the same comparison with a process that has none of them: flash",
        "attention, xFormers, fused operators and fused norm under tp2 on CPUs. [fused.md](fused.md) says what",
        "computes there; in the place of the xFormers package stood one of its signature. The modes of sequence",
        'parallelism are tried on two ranks: [sequence.md](sequence.md). "–": refused, or nothing to be done; the',
        "reasons stand at the end.",
        "",
        "| model type | by | heads | " + " | ".join(columns) + " |",
        "|---|---|---|" + "---|" * len(columns),
    ]
    lines += [
        f"| {row.model_type} | {row.source} | {'; '.join(row.heads)} | "
        + " | ".join(cell(row) for cell in columns.values())
        + " |"
        for row in rows
    ]
    lines += _spread_lines(rows)
    reasons = [
        f"- {feature}: {', '.join(types)}: {reason}." for (feature, reason), types in refusals(rows).items()
    ]
    lines += ["", "## Reasons", "", *reasons] if reasons else []
    return "\n".join([*lines, *_older_lines(kept)]) + "\n"


def _spread_lines(rows: Sequence[ModelRow]) -> list[str]:
    """The part of the page about layouts that spread sequences or share out weights."""
    spread = [row for row in rows if any(map(_spread_by, row.cells))]
    cells = {row.model_type: " | ".join(_spread_cell(row, by) for by in SPREAD) for row in spread}
    heading = [
        "",
        "## Sequences and weights over ranks, beside other axes",
        "",
        "The usual head on two to four ranks, by the same comparison, beside tensor, pipeline and data parallelism",
        "with ZeRO; of Llama, GPT-2 and BERT with recomputation, other schedules and 16 bits too. In how many layouts",
        "it agrees, of those that were tried.",
        "",
        "| model type | " + " | ".join(SPREAD) + " |",
        "|---|" + "---|" * len(SPREAD),
    ]
    return [*heading, *(f"| {name} | {own} |" for name, own in cells.items())] if spread else []


def columns_of(rows: Sequence[ModelRow]) -> dict[str, Callable[[ModelRow], str]]:
    """The columns of the matrix: the text of a row's cell, by the column's heading."""
    layouts = [layout for layout in layouts_of(rows) if layout not in AXES and not _spread_by(layout)]
    return {
        **{heading: partial(ModelRow.cell, layout=layout) for layout, heading in AXES.items()},
        **{feature: partial(ModelRow.feature_cell, feature=feature) for feature in FEATURES},
        **{layout.removesuffix("·fp32"): partial(ModelRow.cell, layout=layout) for layout in layouts},
    }


def spread_columns() -> dict[str, Callable[[ModelRow], str]]:
    """The columns of layouts that spread sequences or share out weights, likewise."""
    return {f"{by}, layouts": partial(_spread_cell, by=by) for by in SPREAD}


def _spread_by(layout: str) -> str:
    """The mode by which a layout spreads sequences, or that it shares out weights; nothing where it does neither."""
    parts = layout.split("·")
    if any(re.fullmatch(r"wp\d+", part) for part in parts):
        return SHARED_WEIGHTS
    return next((mode for mode in SEQUENCE_MODES if mode in parts), "")


def _spread_cell(row: ModelRow, by: str) -> str:
    """In how many layouts of a kind a model agrees, of how many; nothing where it was not tried."""
    found = [row.cells[layout] for layout in row.cells if _spread_by(layout) == by]
    tried, agreed = (sum(each[place] for each in found) for place in (0, 1))
    return f"{agreed} of {tried}" if tried else ""


def versions(kept: dict[str, Any]) -> str:
    """The commit and the releases that the results are of."""
    commit = f", commit {kept['commit']}" if "commit" in kept else ""
    return f"torch {kept['torch']}, transformers {kept['transformers']}{commit}"


def _older_lines(kept: dict[str, Any]) -> list[str]:
    """The cells whose results are of an earlier commit, by commit."""
    by_commit: dict[str, list[str]] = {}
    for cell, commit in kept.get("older", {}).items():
        by_commit.setdefault(commit, []).append(cell)
    heading = ["", "## Older results", "", "Not tried again at the commit above:", ""]
    lines = [f"- {commit}: {'; '.join(sorted(cells))}." for commit, cells in sorted(by_commit.items())]
    return [*heading, *lines] if lines else []
