"""`echelon models`: the last results of the parity check, as a table, for one model, and as docs/models.md.

Those of `--all` are in model_types.py.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

import typer
from rich.console import Console

from .console import aligned, refuse, show_table
from .model_types import LEGEND as LEGEND_OF_TYPES
from .model_types import (
    SEQUENCE_MODES,
    about,
    family_rows,
    kept_coverage,
    reason_lines,
    show_type,
    type_lines,
    types_of,
)

# By head and layout: True if the layout trained like one process.
Outcomes = Mapping[str, Mapping[str, bool]]

# Features that a model can be trained with besides a layout, by their names in the matrix.
FEATURES = (
    *("lazy initialization", "flash attention", "xFormers", "fused operators", "fused norm"),
    *SEQUENCE_MODES,
)
PASSED, FAILED, REFUSED = "yes", "no", "refused: "  # the last is followed by the reason
SHARDED_WEIGHTS = "sharded weights"
AXES = {"tp2·fp32": "TP", "pp2·fp32": "PP"}
SHARDED = (*SEQUENCE_MODES, SHARDED_WEIGHTS)

PAGE = """\
# Models

Made by `echelon models --markdown` from the last results of the tests (`make test-all`): do not edit.

{versions}.

"yes": every head trains under the layout as in one process: loss, every gradient, the norm and every updated
weight, over three AdamW steps with microbatches of unequal size, in fp32 unless stated otherwise.
"3 of 4": 3 of 4 heads do. Empty: not tried. By "table": `shardformer/tables`; by "plan": derived from
transformers' own. Where a plan fails, or a type has none, write a table and register it under the `model_type`:
[policies.md](policies.md). TP and PP are two ranks of that axis alone. Of a model with several parts (BLIP-2,
Gemma 3 with images) only the language model is divided into pipeline stages; the other parts run on its first stage.

Features are tried with the usual head, compared in the same way with a process that has none of them: flash
attention, xFormers, fused operators and fused norm under tp2 on CPUs. [fused.md](fused.md) says which
kernel computes there; the xFormers package was replaced by one with its signature. The modes of sequence
parallelism are tried on two ranks: [sequence.md](sequence.md). "–": refused, or nothing to be done; the
reasons are at the end.
"""
SHARDED_PAGE = """
## Sequences and weights sharded over ranks, beside other axes

The usual head on two to four ranks, by the same comparison, beside tensor, pipeline and data parallelism
with ZeRO; of Llama, GPT-2 and BERT with recomputation, other schedules and 16 bits too. In how many layouts
it agrees, of those that were tried.
"""


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """The results of a model type.

    Args:
        model_type: `config.model_type` of transformers.
        heads: the tested heads.
        cells: by layout, the number of tested heads, and of those that agreed.
        features: by feature, PASSED, FAILED, or REFUSED and the reason.
        source: "table" if Echelon has a table for it, "plan" if it is derived from transformers' own plan.
    """

    model_type: str
    heads: tuple[str, ...]
    cells: Mapping[str, tuple[int, int]]
    features: Mapping[str, str]
    source: str

    def cell(self, layout: str) -> str:
        """Return the cell of a layout in a table: yes, a number of heads, no, or empty if not tested."""
        tried, agreed = self.cells.get(layout, (0, 0))
        if not tried:
            return ""
        if agreed == tried:
            return "yes"
        return f"{agreed} of {tried}" if agreed else "no"

    def feature_cell(self, feature: str) -> str:
        """Return the cell of a feature in a table: yes, no, a dash if it is refused, or empty if not tested."""
        outcome = self.features.get(feature, "")
        return "–" if outcome.startswith(REFUSED) else outcome


def kept_matrix() -> dict[str, Any]:
    """Return the last results: versions, and outcomes by model type, head and layout.

    Outcomes by model type and feature are under "features", model types with a table under "tables".
    """
    matrix: dict[str, Any] = json.loads((files(__package__) / "matrix.json").read_text(encoding="utf-8"))
    return matrix


def rows_of(kept: Mapping[str, Any]) -> list[ModelRow]:
    """Return a row for each model type of `kept_matrix`, in alphabetical order."""
    outcomes: Mapping[str, Outcomes] = kept["rows"]
    features: Mapping[str, Mapping[str, str]] = kept.get("features", {})
    tables: Sequence[str] = kept.get("tables", ())
    return [
        ModelRow(
            model_type=model_type,
            heads=tuple(sorted(outcomes.get(model_type, {}))),
            cells=_cells(outcomes.get(model_type, {})),
            features=features.get(model_type, {}),
            source="table" if model_type in tables else "plan",
        )
        for model_type in sorted({*outcomes, *features})
    ]


def _cells(of_heads: Outcomes) -> dict[str, tuple[int, int]]:
    """Return by layout the number of tested heads, and of those that agreed."""
    cells: dict[str, tuple[int, int]] = {}
    for outcomes in of_heads.values():
        for layout, agreed in outcomes.items():
            num_tried, num_agreed = cells.get(layout, (0, 0))
            cells[layout] = num_tried + 1, num_agreed + agreed
    return cells


def refusals(rows: Sequence[ModelRow]) -> dict[tuple[str, str], list[str]]:
    """Return the model types that refuse a feature, by feature and reason."""
    model_types: dict[tuple[str, str], list[str]] = {}
    for feature in FEATURES:
        for row in rows:
            if row.feature_cell(feature) == "–":
                reason = row.features[feature].removeprefix(REFUSED)
                model_types.setdefault((feature, reason), []).append(row.model_type)
    return model_types


def layouts_of(rows: Sequence[ModelRow]) -> list[str]:
    """Return the layouts of all rows, most frequent first."""
    counts = Counter(layout for row in rows for layout in row.cells)
    return sorted(counts, key=lambda layout: (-counts[layout], len(layout), layout))


def page(kept: dict[str, Any]) -> str:
    """Return the matrix as a page of the documentation."""
    rows = rows_of(kept)
    columns = columns_of(rows)
    cells = (
        [row.model_type, row.source, "; ".join(row.heads), *(cell(row) for cell in columns.values())]
        for row in rows
    )
    lines = [PAGE.format(versions=versions(kept)), *_markdown(["model type", "by", "heads", *columns], cells)]
    if sharded := [row for row in rows if any(map(_sharded_by, row.cells))]:
        cells = ([row.model_type, *(_sharded_cell(row, by) for by in SHARDED)] for row in sharded)
        lines += [SHARDED_PAGE, *_markdown(["model type", *SHARDED], cells)]
    reasons = [
        f"- {feature}: {', '.join(types)}: {reason}." for (feature, reason), types in refusals(rows).items()
    ]
    lines += ["", "## Reasons", "", *reasons] if reasons else []
    return "\n".join([*lines, *_other_lines(kept)]) + "\n"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = (f"| {' | '.join(cells)} |" for cells in (headings, *rows))
    return [next(lines), "|" + "---|" * len(headings), *lines]


def columns_of(rows: Sequence[ModelRow]) -> dict[str, Callable[[ModelRow], str]]:
    """Return the columns of the matrix: by heading, a function from a row to the text of its cell."""
    layouts = [layout for layout in layouts_of(rows) if layout not in AXES and not _sharded_by(layout)]
    return {
        **{heading: partial(ModelRow.cell, layout=layout) for layout, heading in AXES.items()},
        **{feature: partial(ModelRow.feature_cell, feature=feature) for feature in FEATURES},
        **{layout.removesuffix("·fp32"): partial(ModelRow.cell, layout=layout) for layout in layouts},
    }


def _sharded_by(layout: str) -> str:
    """Return the mode by which a layout shards sequences, or SHARDED_WEIGHTS; empty if it shards neither."""
    names = layout.split("·")
    if any(re.fullmatch(r"wp\d+", name) for name in names):
        return SHARDED_WEIGHTS
    return next((mode for mode in SEQUENCE_MODES if mode in names), "")


def _sharded_cell(row: ModelRow, by: str) -> str:
    """Return the numbers of agreeing and of tested layouts of a kind; empty if none was tested."""
    cells = [row.cells[layout] for layout in row.cells if _sharded_by(layout) == by]
    tried, agreed = sum(tried for tried, _ in cells), sum(agreed for _, agreed in cells)
    return f"{agreed} of {tried}" if tried else ""


def versions(kept: dict[str, Any]) -> str:
    """Return the commit and the releases of the results."""
    commit = f", commit {kept['commit']}" if "commit" in kept else ""
    return f"torch {kept['torch']}, transformers {kept['transformers']}{commit}"


def _other_lines(kept: dict[str, Any]) -> list[str]:
    """Return a table of the cells whose results are from another commit than the rest, by commit and model type."""
    by_type: dict[tuple[str, str], list[str]] = {}
    for cell, commit in sorted(kept.get("others", {}).items()):
        model_type, _, result = cell.partition(" ")
        by_type.setdefault((commit, model_type), []).append(result)
    heading = [
        "",
        "## Results of other commits",
        "",
        "Not tried at the commit above, or again at a later one:",
        "",
    ]
    rows = [[*key, "; ".join(results)] for key, results in sorted(by_type.items())]
    return [*heading, *_markdown(["commit", "model type", "results"], rows)] if rows else []


# The columns of the table on a terminal of 80 characters: heading, and the heading of the page's column.
SHORT = {
    "TP": "TP",
    "PP": "PP",
    "lazy": "lazy initialization",
    "fa": "flash attention",
    "xf": "xFormers",
    "ops": "fused operators",
    "norm": "fused norm",
    "sg": "split_gather",
    "ring": "ring",
    "a2a": "all_to_all",
    "ra": "ring_attn",
}
NEXT = (
    "What is refused (–), or not tried: `echelon verify --model {name} --tp 2`, with your layout, gives the full "
    "reason, and docs/policies.md says what to do."
)
LEGEND = """\
by    table: Echelon's own (shardformer/tables); plan: transformers' own
hd    heads (classes) of the model type that were tried
TP PP two ranks of tensor parallelism, two stages of a pipeline
lazy  lazy initialization     fa    flash attention       xf    xFormers
ops   fused operators         norm  fused norm
sg    split_gather            ring  ring                  a2a   all_to_all
ra    ring_attn               (these four: sequence parallelism on two ranks)
more  further layouts in which all heads agree, of those that were tried
yes   trains as in one process; 3/4: so many heads do; no: none does
–     refused, or nothing to be done; blank: not tried
One model type in full, with heads, layouts and reasons: echelon models llama"""


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this model type, or that of this class, in full, or all that start with this prefix.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help=(
                "Is my model supported? Every model type of transformers: what agrees with one process under tensor "
                "parallelism, pipelines, the modes of sequence parallelism and ZeRO; what is refused, or not built "
                "here, and why; percentages by family."
            ),
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option(help="Print the page docs/models.md.")] = False,
) -> None:
    """Show the last results of the parity check: every model type, all its heads, tied and untied, and its features.

    "yes": every head trains under the layout like in one process, over three steps and unequal microbatches.
    A terminal shows a table of 80 columns with a legend, a pipe gets the full page. `echelon verify` tests a single
    layout on this machine. These types are tried with every head and feature; --all has the others.
    """
    if markdown and (every or name is not None):
        other = "--all" if every else repr(name)
        refuse("models", [f"--markdown prints all types of docs/models.md: leave {other} out"])
    if name is not None:
        _show_named(name, from_all=every)
    elif every:
        _show_all()
    else:
        kept, console = kept_matrix(), Console()
        if console.is_terminal and not markdown:
            typer.echo("\n".join([*short_lines(rows_of(kept)), "", LEGEND, f"{versions(kept)}."]))
        else:
            typer.echo(page(kept), nl=False)


def _show_named(name: str, *, from_all: bool) -> None:
    """Print a type in full, or else all with this prefix: from the matrix, and types of `--all` that it does not have.

    Args:
        from_all: leave the matrix out.
    """
    kept, coverage = kept_matrix(), kept_coverage()
    rows = [] if from_all else rows_of(kept)
    known = {row.model_type for row in rows}
    types = types_of(coverage)
    others = [model_type for model_type in types if model_type.name not in known]
    names = [*known, *(model_type.name for model_type in others)]
    by_class = {model_type.plain.get("class"): model_type.name for model_type in types}
    chosen = _named(by_class.get(name, name), names)
    refuse("models", [] if chosen else [_unknown(name, names)])
    named_rows = [row for row in rows if row.model_type in chosen]
    for row in named_rows:
        show_row(row, layouts_of(rows))
    if named_rows:
        typer.echo(f"{versions(kept)}.")
    named_types = [model_type for model_type in others if model_type.name in chosen]
    for model_type in named_types:
        show_type(model_type)
    if named_types:
        typer.echo(about(coverage))
    typer.echo(NEXT.format(name=min(chosen)))


def _show_all() -> None:
    """Print a line for each type, percentages by family and a legend; if not to a terminal, also all reasons."""
    coverage = kept_coverage()
    types = types_of(coverage)
    lines = [*type_lines(types), "", *aligned(family_rows(types), between="  "), "", LEGEND_OF_TYPES]
    if not Console().is_terminal:
        lines += ["", "Reasons:", *reason_lines(types)]
    typer.echo("\n".join([*lines, about(coverage)]))


def _named(name: str, names: Sequence[str]) -> set[str]:
    """Return the name itself if there is such a model type, or else all that start with it."""
    wanted = name.lower()
    exact = {known for known in names if known.lower() == wanted}
    return exact or {known for known in names if known.lower().startswith(wanted)}


def _unknown(name: str, names: Sequence[str]) -> str:
    """Return the error of a name that no model type has."""
    from ..cluster.errors import did_you_mean  # imports torch

    return (
        f"no model type {name!r} was tried: {did_you_mean(name, names)}give the `model_type` of its config.json. "
        f"`echelon verify --model {name}` tries one of transformers, and docs/policies.md is about all others"
    )


def short_lines(rows: Sequence[ModelRow]) -> list[str]:
    """Return a line of at most 80 characters for each model type, below a line of headings."""
    columns = columns_of(rows)
    headings = ["model type", "by", "hd", *SHORT, "more"]
    lines = aligned([headings, *([*_short(row, columns), _more(row)] for row in rows)], between=" ")
    return [*lines, lines[0]]


def _short(row: ModelRow, columns: Mapping[str, Callable[[ModelRow], str]]) -> list[str]:
    cells = (columns[long](row) if long in columns else "" for long in SHORT.values())
    return [row.model_type, row.source, str(len(row.heads)), *(cell.replace(" of ", "/") for cell in cells)]


def _more(row: ModelRow) -> str:
    further = [counts for layout, counts in row.cells.items() if layout not in AXES]
    return f"{sum(tried == agreed for tried, agreed in further)}/{len(further)}" if further else ""


def show_row(row: ModelRow, layouts: Sequence[str]) -> None:
    """Print all results of a model type: heads, features with the usual head, and layouts in this order."""
    features = []
    for feature in FEATURES:
        if result := row.features.get(feature):
            is_refused = result.startswith(REFUSED)
            text = f"{feature}: {result.removeprefix(REFUSED)}" if is_refused else feature
            features.append((row.feature_cell(feature), text))
    agreed = [
        ("{1}/{0}".format(*row.cells[layout]), layout.removesuffix("·fp32"))
        for layout in layouts
        if layout in row.cells
    ]
    heads = ("heads", "; ".join(row.heads) or "none was tried")
    show_table(
        f"{row.model_type}, sharded by a {row.source}: features with the usual head; layouts with the heads that agree",
        ("", ""),
        [heads, *features, *agreed],
        sections=[1, 1 + len(features)],
    )
