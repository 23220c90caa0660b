"""`echelon models`: the last results of the parity check, as a table and by name; models_page.py has the docs' page."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.console import Console

from ..verify.matrix import FEATURES, REFUSED, ModelRow, kept_matrix, layouts_of, rows_of
from .console import refuse
from .models_page import AXES, columns_of, page, spread_columns, versions

# The columns of the table on a terminal, which has room for 80 characters: heading, and the page's own column.
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
INDENT = 10  # of the names of features and layouts


def models(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this model type in full; or all whose names begin so.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print the page that docs/models.md is.")] = False,
) -> None:
    """Show the last results of the parity check: every model type, all its heads, tied and untied, and its features.

    "yes": every head trains under the layout as in one process, over three steps and unequal microbatches. A terminal
    gets a table of 80 columns with a legend, a pipe every column in full. `echelon verify` tries a single layout here
    and now.
    """
    kept = kept_matrix()
    if markdown:
        refuse("models", [] if name is None else [f"--markdown is of all model types: leave {name!r} out"])
        typer.echo(page(kept), nl=False)
        return
    rows = rows_of(kept)
    console = Console()
    if name is not None:
        named = rows_named(name, rows)
        refuse("models", [] if named else [_unknown(name, rows)])
        width = console.width if console.is_terminal else None
        for row in named:
            typer.echo("\n".join(described(row, layouts_of(rows), width=width)) + "\n")
        typer.echo(f"{versions(kept)}.")
    elif console.is_terminal:
        typer.echo("\n".join([*short_lines(rows), "", LEGEND, f"{versions(kept)}."]))
    else:
        typer.echo("\n".join([*full_lines(rows), f"{versions(kept)}."]))


def rows_named(name: str, rows: Sequence[ModelRow]) -> list[ModelRow]:
    """The row of a model type, or where there is none of that name, those that begin with it."""
    wanted = name.lower()
    exact = [row for row in rows if row.model_type.lower() == wanted]
    return exact or [row for row in rows if row.model_type.lower().startswith(wanted)]


def _unknown(name: str, rows: Sequence[ModelRow]) -> str:
    close = get_close_matches(name.lower(), [row.model_type for row in rows])
    advice = f"did you mean {' or '.join(close)}?" if close else "`echelon models` lists those that were"
    return f"no model type {name!r} was tried: {advice}"


def short_lines(rows: Sequence[ModelRow]) -> list[str]:
    """A line for each model type, of at most 80 characters, between headings."""
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


def full_lines(rows: Sequence[ModelRow]) -> list[str]:
    """A line for each model type with all that the tables of the docs' page have."""
    columns = columns_of(rows) | spread_columns()
    cells = (
        [row.model_type, row.source, "; ".join(row.heads), *(cell(row) for cell in columns.values())]
        for row in rows
    )
    return aligned([["model type", "by", "heads", *columns], *cells], between=" | ")


def aligned(table: Sequence[Sequence[str]], *, between: str) -> list[str]:
    """Lines of cells, each column as wide as its widest."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        between.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def described(row: ModelRow, layouts: Sequence[str], *, width: int | None) -> Iterator[str]:
    """Lines with all that is known of a model type.

    Args:
        layouts: in the order in which they are told.
        width: of the terminal; None wraps nothing.
    """
    yield f"{row.model_type}, split by a {row.source}"
    yield "\nheads"
    yield from _wrapped("; ".join(row.heads) or "none was tried", width, indent=2)
    yield "\nfeatures, with the usual head"
    for feature in FEATURES:
        if feature in row.features:
            reason = row.features[feature]
            reason = f": {reason.removeprefix(REFUSED)}" if reason.startswith(REFUSED) else ""
            first, *others = _wrapped(f"{feature}{reason}", width, indent=INDENT)
            yield f"  {row.feature_cell(feature):<{INDENT - 2}}{first.lstrip()}"
            yield from others
    yield "\nlayouts: heads that train as in one process, of those tried"
    for layout in layouts:
        if layout in row.cells:
            tried, agreed = row.cells[layout]
            name = layout.removesuffix("·fp32").replace("·", "· ")  # a long one may break there
            first, *others = (line.replace("· ", "·") for line in _wrapped(name, width, indent=INDENT))
            yield f"  {f'{agreed}/{tried}':<{INDENT - 2}}{first.lstrip()}"
            yield from others


def _wrapped(text: str, width: int | None, *, indent: int) -> list[str]:
    """Lines that break between words alone."""
    margin = " " * indent
    if width is None:
        return [margin + text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
