"""`echelon checkpoint diff`: what differs between two checkpoints, as a table."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import typer
from rich.table import Table

from ..checkpoint.difference import Comparison, Difference
from ..checkpoint.inspect import open_folder
from .checkpoint_folder import chosen_folder, folder_faults, progress_bar, told
from .console import refuse, table_console


def run_diff(a: Path, b: Path, *, tolerance: float) -> None:
    """Compare two checkpoints and print a table; see `checkpoint.diff`."""
    faults = [*folder_faults(a), *folder_faults(b)]
    if not (isfinite(tolerance) and tolerance >= 0):
        faults.append(f"tolerance={tolerance} must be a number from 0 on")
    refuse("checkpoint diff", faults)
    with told("diff"):
        comparison = Comparison(
            a=open_folder(chosen_folder(a)), b=open_folder(chosen_folder(b)), tolerance=tolerance
        )
        with progress_bar(comparison.total_bytes, "comparing") as progress:
            differences = list(comparison.differences(progress))
    for note in comparison.notes():
        typer.echo(note, err=True)
    if differences:
        table_console().print(_table(differences))
    typer.echo(_verdict(differences, tolerance))
    raise typer.Exit(1 if differences else 0)


def _table(differences: Sequence[Difference]) -> Table:
    table = Table()
    table.add_column("in")
    table.add_column("name", overflow="fold")
    table.add_column("what", overflow="fold")
    for heading in ("largest |a − b|", "of max(|a|, |b|)", "entries"):
        table.add_column(heading, justify="right")
    for each in differences:
        distance = each.distance
        numbers = (
            ("", "", "")
            if distance is None
            else (
                f"{distance.absolute:.3g}",
                f"{distance.relative:.3g}",
                f"{distance.differing:,} of {distance.entries:,}",
            )
        )
        table.add_row(each.part, each.name, each.what, *numbers)
    return table


def _verdict(differences: Sequence[Difference], tolerance: float) -> str:
    if differences:
        return f"{len(differences)} differences"
    return f"nothing differs by more than {tolerance:g} of its tensor" if tolerance else "equal to the bit"
