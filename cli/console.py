"""Print errors to stderr and tables to stdout, in one format for every command."""

from collections.abc import Iterable, Sequence

import typer
from rich.console import Console
from rich.table import Table

BAD_ARGUMENTS = 2
WIDTH = 160  # width of tables if the output is not a terminal


def refuse(command: str, errors: Sequence[str]) -> None:
    """Print all errors and exit with status 2; without errors do nothing."""
    for error in errors:
        typer.echo(f"echelon {command}: {error}", err=True)
    if errors:
        raise typer.Exit(BAD_ARGUMENTS)


def show_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, sections: Iterable[int] = ()
) -> None:
    """Print a table. Columns whose heading starts with ">" are right-aligned; others wrap long texts.

    Args:
        sections: numbers of the rows, counted from 1, that are followed by a line.
    """
    table = Table(title=title or None, title_justify="left", show_header=any(headings))
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading[1:], justify="right")
        else:
            table.add_column(heading, overflow="fold")
    ends = set(sections)
    for number, row in enumerate(rows, start=1):
        table.add_row(*row, end_section=number in ends)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)
