"""`echelon models`: which models are proven under which layouts, as a table."""

from typing import Annotated, Any

import typer
from rich.table import Table

from ..shardformer import model_types
from ..verify.matrix import ModelRow, kept_matrix, layouts_of, rows_of
from .console import table_console


def models(
    markdown: Annotated[bool, typer.Option(help="Print the page that docs/models.md is.")] = False,
) -> None:
    """Show the last results of the parity check: every model type, all its heads, tied and untied.

    "yes": every head trains under the layout as in one process, over three steps and unequal microbatches; "3 of 4":
    so many heads do; "no": none does; nothing: not tried. `echelon verify` tries a single one here and now.
    """
    kept = kept_matrix()
    if markdown:
        typer.echo(page(kept), nl=False)
    else:
        show(kept)


def show(kept: dict[str, Any]) -> None:
    """Print the matrix on a terminal."""
    rows = rows_of(kept["rows"])
    layouts = layouts_of(rows)
    table = Table(title=_versions(kept), title_justify="left")
    for heading in ("model type", "by", "heads", *map(_short, layouts)):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row.model_type, _source(row), str(len(row.heads)), *(row.cell(each) for each in layouts)
        )
    console = table_console()
    console.print(table)


def page(kept: dict[str, Any]) -> str:
    """The matrix as a page of the documentation."""
    rows = rows_of(kept["rows"])
    layouts = layouts_of(rows)
    lines = [
        "# Models",
        "",
        "Made by `echelon models --markdown` from the last results of `tests/models` (`make test-all`): do not edit.",
        "",
        f"{_versions(kept)}.",
        "",
        '"yes": every head trains under the layout as in one process: loss, every gradient, the norm and every updated',
        "weight, over three AdamW steps with microbatches of unequal size, in fp32 where nothing else is said.",
        '"3 of 4": so many heads do. Nothing: not tried. By "table": `shardformer/tables`; by "plan": derived from',
        "transformers' own.",
        "",
        "| model type | by | heads | " + " | ".join(map(_short, layouts)) + " |",
        "|---|---|---|" + "---|" * len(layouts),
    ]
    lines += [
        f"| {row.model_type} | {_source(row)} | {'; '.join(row.heads)} | "
        + " | ".join(row.cell(each) for each in layouts)
        + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _versions(kept: dict[str, Any]) -> str:
    return f"torch {kept['torch']}, transformers {kept['transformers']}"


def _source(row: ModelRow) -> str:
    return "table" if row.model_type in model_types() else "plan"


def _short(layout: str) -> str:
    return layout.removesuffix("·fp32")
