"""`echelon checkpoint verify`: whether a checkpoint is as it was written, and fits together."""

from pathlib import Path

import typer

from ..checkpoint.inspect import Findings, examine_checkpoint, examine_pretrained
from ..checkpoint.steps import MANIFEST
from .checkpoint_folder import chosen_folder, folder_faults, progress_bar, told
from .console import refuse


def run_verify(directory: Path) -> None:
    """Read a checkpoint and print its damage; see `checkpoint.verify`."""
    refuse("checkpoint verify", folder_faults(directory))
    folder = chosen_folder(directory)
    with told("verify"):  # what may not be read may be sound
        findings = _findings(folder)
    for note in findings.notes:
        typer.echo(f"note: {note}", err=True)
    for fault in findings.errors:
        typer.echo(fault)
    typer.echo(f"{folder} is {'damaged' if findings.errors else 'sound'}")
    raise typer.Exit(1 if findings.errors else 0)


def _findings(folder: Path) -> Findings:
    if not (folder / MANIFEST).is_file():
        return examine_pretrained(folder)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    with progress_bar(total, "reading") as progress:
        return examine_checkpoint(folder, progress=progress)
