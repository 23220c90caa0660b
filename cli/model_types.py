"""`echelon models --all`: every model type of transformers, and what of it is proven, refused, or not built here.

From cli/coverage.json, the records of `make coverage`; docs/coverage.md is made from the same.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

import typer

from .console import aligned, show_table

Row = Mapping[str, Any]
SEQUENCE_MODES = ("split_gather", "ring", "all_to_all", "ring_attn")
# The columns, with their headings on 80 characters: axes of a layout without a mode of sequence parallelism, and modes.
AXES = {"TP": "tp", "PP": "pp", "ZeRO": "zero"}
COLUMNS = {
    "TP": "TP",
    "PP": "PP",
    **dict(zip(SEQUENCE_MODES, ("sg", "ring", "a2a", "ra"), strict=True)),
    "ZeRO": "ZeRO",
}
# The records of parity on processes, whose rows have outcomes by layout, and the columns that they are about.
PARITY = {
    "parity": ("TP", "PP"),
    "five": ("TP", "PP", "ZeRO"),
    "sequences": (*SEQUENCE_MODES, "ZeRO"),
    "heads": ("TP", "PP"),
}
CONVOLUTIONAL = "convolutional"
NOT_BUILT = "not built here"
# Records of what shards layers and what places them on stages: the field of their rows, and its meaning.
SOURCES = {"splits": ("split", "layers sharded"), "stages": ("stages", "stages")}
# Outcomes of layouts, those that decide about a cell first, and how a cell shows them.
CELLS = {"departs": "no", "agrees": "yes", "fails": "err", "refused": "–"}
# Kinds of reasons why a type is not built, the first that matches; the last are limits of the small configs and
# batches, not of the types.
REASONS = (
    ("a package is missing", r"requires the (\w+) library"),
    ("it refuses to train", r"[Tt]raining .*(not supported|not implemented)|does not support training"),
    ("a limit of time or memory", r"passed a limit"),
    ("it has no forward", r"required \"forward\""),
    ("no step changes the loss", r"after a step"),
    ("no small config was found", r"^(StrictDataclass|Ambiguous)"),
    ("no batch was found", r""),
)
LEGEND = """\
TP PP  tensor parallelism, pipeline stages       ZeRO  sharded optimizer states
sg     split_gather       ring  ring              a2a  all_to_all
ra     ring_attn                        (these four: sequence parallelism)
heads  further classes of the type that agree, of those that were tried
yes    three steps on ranks have the numbers of one process; no: they have not
–      refused, with a reason, before the training starts
err    an error, or a limit of time or memory; blank: not tried
One model type in full, with layouts and reasons: echelon models NAME
Types with a table or a plan, with every head and feature: echelon models"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a model type under a layout.

    Args:
        layout: its name; empty for all layouts of a record.
        columns: those that it tells about.
        outcome: a key of `CELLS`.
        why: the reason, unless it agrees.
    """

    layout: str
    columns: tuple[str, ...]
    outcome: str
    why: str = ""


def columns_of(layout: str) -> tuple[str, ...]:
    """Return the columns that a layout tells about: its mode of sequence parallelism, or else its axes."""
    names = layout.split("·")
    modes = tuple(mode for mode in SEQUENCE_MODES if mode in names)
    axes = {name.rstrip("0123456789") for name in names}
    return modes or tuple(column for column, axis in AXES.items() if axis in axes)


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """The results of a model type.

    Args:
        plain: its row of the record of plain loops, without Echelon.
        outcomes: under every layout of the other records.
        heads: by further class, its outcomes.
        sources: what shards its layers and what places them on stages, as far as it is known.
    """

    plain: Row
    outcomes: tuple[Outcome, ...]
    heads: Mapping[str, tuple[Outcome, ...]]
    sources: Mapping[str, str]

    @property
    def name(self) -> str:
        """`config.model_type` of transformers."""
        return str(self.plain["type"])

    @property
    def family(self) -> str:
        """The family by which types are counted."""
        return CONVOLUTIONAL if self.plain.get("convolutional") else str(self.plain["family"])

    @property
    def is_built(self) -> bool:
        """True if a small model of it trains here."""
        return bool(self.plain.get("trains")) or any(outcome.layout for outcome in self.outcomes)

    @cached_property
    def results(self) -> Mapping[str, Outcome]:
        """The result of each column that was tried."""
        by_column = {
            column: [outcome for outcome in self.outcomes if column in outcome.columns] for column in COLUMNS
        }
        return {column: deciding(outcomes) for column, outcomes in by_column.items() if outcomes}

    def cell(self, column: str) -> str:
        """Return the cell of a column in a table."""
        return CELLS[self.results[column].outcome] if column in self.results else ""

    @property
    def head_cell(self) -> str:
        """The numbers of further classes that agree, and that were tried; empty if none was."""
        agreed = sum(deciding(outcomes).outcome == "agrees" for outcomes in self.heads.values())
        return f"{agreed}/{len(self.heads)}" if self.heads else ""

    @property
    def reason(self) -> str:
        """Why it is not built."""
        return str(self.plain.get("reason", "")) or "no result is kept"

    @property
    def kind_of_reason(self) -> str:
        """The kind of the reason why it is not built."""
        return kind_of_reason(self.plain)


def kind_of_reason(plain: Row) -> str:
    """Return the kind of the reason in a row of the record of plain loops."""
    return next(kind for kind, pattern in REASONS if re.search(pattern, plain.get("reason", "")))


def deciding(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome that decides: the first of `CELLS` that there is, under the simplest layout."""
    order = list(CELLS)
    return min(outcomes, key=lambda outcome: (order.index(outcome.outcome), outcome.layout.count("·")))


def kept_coverage() -> dict[str, list[dict[str, Any]]]:
    """Return the records of `make coverage`: lists of rows by name."""
    coverage: dict[str, Any] = json.loads((files(__package__) / "coverage.json").read_text(encoding="utf-8"))
    return coverage


def about(coverage: Mapping[str, Sequence[Row]]) -> str:
    """Return the releases of the results."""
    releases = {(row["torch"], row["transformers"]) for row in coverage["rows"]}
    return (
        "; ".join(f"torch {torch}, transformers {transformers}" for torch, transformers in sorted(releases))
        + "."
    )


def types_of(coverage: Mapping[str, Sequence[Row]]) -> list[ModelType]:
    """Return all model types of `kept_coverage`, in alphabetical order, with the results of its release."""
    plain = {row["type"]: row for row in coverage["rows"]}
    release = {row["transformers"] for row in coverage["rows"]}
    outcomes: dict[str, dict[str, list[Outcome]]] = {}  # by type and head, the usual one without a name
    sources: dict[str, dict[str, str]] = {}
    for record, columns in PARITY.items():
        for row in coverage.get(record, ()):
            if row["transformers"] in release:
                model_type, _, head = row["type"].partition("/")
                outcomes.setdefault(model_type, {}).setdefault(head, []).extend(_outcomes(row, columns))
    for record, (field, _) in SOURCES.items():
        for row in coverage.get(record, ()):
            if row[field] != "refused":
                sources.setdefault(row["type"], {})[record] = row[field]
    return [
        ModelType(
            plain=plain.get(name, {"type": name, "family": "other"}),
            outcomes=tuple(outcomes.get(name, {}).get("", ())),
            heads={head: tuple(tried) for head, tried in outcomes.get(name, {}).items() if head},
            sources=sources.get(name, {}),
        )
        for name in sorted({*plain, *outcomes})
    ]


def _outcomes(row: Row, columns: tuple[str, ...]) -> list[Outcome]:
    """Return the outcomes of a row of a record; `columns` are those that the record is about."""
    results = [(tried["layout"], tried["outcome"], tried.get("why", "")) for tried in row.get("layouts", ())]
    results += [(layout, "refused", why) for layout, why in row.get("refused", {}).items()]
    results = results or [("", row["parity"], row.get("why", ""))]
    return [
        Outcome(layout=layout, columns=columns_of(layout) if layout else columns, outcome=outcome, why=why)
        for layout, outcome, why in results
    ]


def type_lines(types: Sequence[ModelType]) -> list[str]:
    """Return a line of at most 80 characters for each type, below a line of headings."""
    headings = ["model type", *COLUMNS.values(), "heads"]
    cells = ([model_type.name, *map(model_type.cell, COLUMNS), model_type.head_cell] for model_type in types)
    first, *lines = aligned([headings, *cells], between="  ")
    width = max(len(model_type.name) for model_type in types)
    return [
        first,
        *(
            line if model_type.is_built else f"{line.ljust(width)}  {NOT_BUILT}: {model_type.kind_of_reason}"
            for model_type, line in zip(types, lines, strict=True)
        ),
        first,
    ]


def family_rows(types: Sequence[ModelType]) -> list[tuple[str, ...]]:
    """Return a row of headings, and for each family and all: numbers of types, and the % of yes in each column.

    In % of the types that are built here, and were tried; the number of these, if not all were.
    """
    families: dict[str, list[ModelType]] = {}
    for model_type in types:
        families.setdefault(model_type.family, []).append(model_type)
    ordered = sorted(
        families.items(), key=lambda family: (family[0] == CONVOLUTIONAL, -len(family[1]), family[0])
    )
    everything = [model_type for model_type in types if model_type.family != CONVOLUTIONAL]
    ordered.insert(len(ordered) - (CONVOLUTIONAL in families), ("all", everything))
    return [
        ("family", "types", "built", *COLUMNS.values()),
        *(
            (
                name,
                str(len(members)),
                str(sum(model_type.is_built for model_type in members)),
                *_shares(members),
            )
            for name, members in ordered
        ),
    ]


def _shares(types: Sequence[ModelType]) -> list[str]:
    """Return for each column the % of yes of the types that are built."""
    cells = []
    for column in COLUMNS:
        tried = [
            model_type.cell(column)
            for model_type in types
            if model_type.is_built and column in model_type.results
        ]
        cells.append(f"{100 * tried.count('yes') // len(tried)}%" if tried else "")
    return cells


def reason_lines(types: Sequence[ModelType]) -> list[str]:
    """Return a line for each reason of a type for which a cell is not yes, with its columns."""
    lines = []
    for model_type in types:
        columns_by_why: dict[str, list[str]] = {}
        for column, result in model_type.results.items():
            if result.outcome != "agrees":
                why = f"{result.outcome}: {result.why}"
                columns_by_why.setdefault(why, []).append(column)
        if not model_type.is_built:
            columns_by_why = {f"{NOT_BUILT}: {model_type.reason}": []}
        lines += [
            f"- {', '.join([model_type.name, *columns])} {' '.join(why.split())}"
            for why, columns in columns_by_why.items()
        ]
    return lines


def show_type(model_type: ModelType) -> None:
    """Print all results of a model type: columns with their reasons, layouts, and further classes."""
    results = [_cells(column, result) for column, result in model_type.results.items()]
    if not model_type.is_built:
        results = [(NOT_BUILT, model_type.reason)]
    # A layout may be in several records.
    layouts = dict.fromkeys(
        (CELLS[outcome.outcome], outcome.layout) for outcome in model_type.outcomes if outcome.layout
    )
    heads = [_cells(head, deciding(outcomes)) for head, outcomes in model_type.heads.items()]
    kind = model_type.plain.get("class", "a class of another package")
    sources = "".join(f", {SOURCES[record][1]}: {source}" for record, source in model_type.sources.items())
    typer.echo(f"{model_type.name} ({kind}){sources}; layouts of the usual class, and further classes:")
    show_table(
        "",
        ("", ""),
        [*results, *layouts, *heads],
        sections=[len(results), len(results) + len(layouts)],
    )
    untried = [column for column in COLUMNS if column not in model_type.results]
    if model_type.is_built and untried:
        typer.echo(f"Not tried: {', '.join(untried)}.")


def _cells(name: str, result: Outcome) -> tuple[str, str]:
    return CELLS[result.outcome], f"{name}: {result.why}" if result.why else name
