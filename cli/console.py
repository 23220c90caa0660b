"""What every command says in the same way: refusals on stderr, tables on stdout."""

from collections.abc import Sequence

import typer
from rich.console import Console

BAD_ARGUMENTS = 2
WIDTH = 160  # of a table where the output is no terminal


def refuse(command: str, faults: Sequence[str]) -> None:
    """Tell all faults and leave with status 2; without faults do nothing."""
    for fault in faults:
        typer.echo(f"echelon {command}: {fault}", err=True)
    if faults:
        raise typer.Exit(BAD_ARGUMENTS)


def table_console() -> Console:
    """Where tables are printed."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
