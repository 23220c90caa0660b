"""What all commands on checkpoints have in common: which folder is meant, how damage is told, and a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from tqdm import tqdm

from ..checkpoint.inspect import find_folder


def folder_faults(path: Path) -> list[str]:
    """Why there is nothing to open."""
    try:
        find_folder(path)
    except (ValueError, OSError) as error:
        return [str(error)]
    return []


def chosen_folder(path: Path) -> Path:
    """The folder that is meant, said on stderr where it is not the one given."""
    folder = find_folder(path)
    if folder != path:
        typer.echo(f"{path}: the newest complete step is {folder.name}", err=True)
    return folder


@contextmanager
def told(command: str) -> Iterator[None]:
    """Tell what cannot be read or written, and leave with status 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"echelon checkpoint {command}: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Bytes on stderr, on a terminal."""
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False
    ) as bar:
        yield bar.update


def shown_bytes(count: int) -> str:
    """A number of bytes, as one reads it."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
