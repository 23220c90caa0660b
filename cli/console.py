"""Print errors to stderr and tables to stdout, in one format for every command."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..pipeline.timeline_drawing import SUFFIXES, require_matplotlib

BAD_ARGUMENTS = 2
WIDTH = 160  # width of tables if the output is not a terminal


def refuse(command: str, errors: Sequence[str]) -> None:
    """Print all errors and exit with status 2; without errors do nothing."""
    for error in errors:
        typer.echo(f"echelon {command}: {error}", err=True)
    if errors:
        raise typer.Exit(BAD_ARGUMENTS)


@contextmanager
def refusing(command: str, prefix: str = "") -> Iterator[None]:
    """Refuse by a ValueError of the block: print it after a prefix and exit with status 2."""
    try:
        yield
    except ValueError as error:
        refuse(command, [f"{prefix}{error}"])


def show_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, sections: Iterable[int] = ()
) -> None:
    """Print a table. Columns whose heading starts with ">" are right-aligned; others wrap long texts.

    Args:
        rows: cells; strings are printed as they are, whatever brackets they have.
        sections: numbers of the rows, counted from 1, that are followed by a line.
    """
    table = Table(title=escape(title) or None, title_justify="left", show_header=any(headings))
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading[1:], justify="right")
        else:
            table.add_column(heading, overflow="fold")
    ends = set(sections)
    for number, row in enumerate(rows, start=1):
        cells = (cell if isinstance(cell, Text) else Text(cell) for cell in row)
        table.add_row(*cells, end_section=number in ends)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def is_set_by_user(context: Any, name: str) -> bool:
    """Return True if an argument of a command, in typer's or click's context, is not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def picture_errors(option: str, path: Path) -> list[str]:
    """List all reasons why nothing can be drawn to the file of an option."""
    errors = []
    if path.suffix.lower() not in SUFFIXES:
        errors.append(f"{option}={str(path)!r} must end in one of {', '.join(SUFFIXES)}")
    if path.is_dir():
        errors.append(f"{option}={str(path)!r} is a folder: give the name of a file")
    if not path.parent.is_dir():
        errors.append(f"{option}={str(path)!r}: there is no folder {str(path.parent)!r}, make it first")
    try:
        require_matplotlib()
    except ImportError as error:
        errors.append(str(error))
    return errors


def aligned(table: Sequence[Sequence[str]], *, between: str) -> list[str]:
    """Return lines of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        between.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
