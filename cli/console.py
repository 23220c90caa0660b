"""Errors on stderr and tables on stdout, alike for every command."""

from collections.abc import Sequence

import typer
from rich.console import Console

BAD_ARGUMENTS = 2
WIDTH = 160  # of a table where the output is no terminal


def refuse(command: str, errors: Sequence[str]) -> None:
    """Report all errors and leave with status 2; without errors do nothing."""
    for error in errors:
        typer.echo(f"echelon {command}: {error}", err=True)
    if errors:
        raise typer.Exit(BAD_ARGUMENTS)


def table_console() -> Console:
    """The console that tables are printed to."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
