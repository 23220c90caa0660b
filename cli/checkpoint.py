"""`echelon checkpoint`: inspect, compare and verify checkpoints.

torch is imported inside functions, so that help needs no torch.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import refuse, show_table

if TYPE_CHECKING:
    from ..checkpoint.difference import Difference
    from ..checkpoint.inspection import Findings

FOLDER_HELP = "A step-… folder, the folder above (its newest complete step), or a Hugging Face folder."
Folder = Annotated[Path, typer.Argument(metavar="DIR", help=FOLDER_HELP, show_default=False)]

checkpoint = typer.Typer(
    help="Inspect, compare and check checkpoints, without a process group, with one tensor in memory at a time.",
    no_args_is_help=True,
)


@checkpoint.command()
def inspect(
    directory: Folder,
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATTERN]",
            help="With --tensors: only names that match this shell pattern: '*.layers.0.*'.",
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List tensors, with their files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the contents of a checkpoint. No tensor is read.

    Exit status: 0 shown, 1 damaged, 2 bad arguments.
    """
    from ..checkpoint.inspection import list_tensors, open_folder, plain, summarize

    errors = []
    if pattern is not None and not tensors:
        errors.append(f"{pattern!r} is a pattern of names: give --tensors too")
    (folder,) = checkpoint_folders("inspect", directory, errors=errors)
    with reported("inspect"):
        opened = open_folder(folder)
        summary = summarize(opened)
    listing = list_tensors(opened, pattern or "*") if tensors else iter(())
    if as_json:
        listed = {"tensors": list(listing)} if tensors else {}
        typer.echo(json.dumps(plain(summary | listed), indent=2))
        return
    show_summary(summary)
    if tensors:
        lines = (
            (line["name"], str(list(line["shape"])), line["dtype"], ", ".join(line["files"]))
            for line in listing
        )
        show_table(f"tensors {pattern or '*'}", ("tensor", "shape", "format", "files"), lines)


@checkpoint.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=FOLDER_HELP, show_default=False)],
    b: Annotated[
        Path,
        typer.Argument(
            metavar="B", help="The checkpoint to compare with; another layout may have written it."
        ),
    ],
    tolerance: Annotated[
        float,
        typer.Option(
            help="Allowed |a − b|, as a fraction of the tensor's largest entry; 0 compares every bit."
        ),
    ] = 0.0,
) -> None:
    """Compare two checkpoints: tensors, options of the optimizer, scheduler, position in the data, and all other state.

    Of Hugging Face folders only the models are compared. Exit status: 0 equal, 1 different or damaged,
    2 bad arguments.
    """
    from ..checkpoint.difference import Comparison
    from ..checkpoint.inspection import open_folder

    errors = []
    if not (isfinite(tolerance) and tolerance >= 0):
        errors.append(f"tolerance={tolerance} must be a number of at least 0")
    folders = checkpoint_folders("diff", a, b, errors=errors)
    with reported("diff"):
        first, second = map(open_folder, folders)
        comparison = Comparison(a=first, b=second, tolerance=tolerance)
        with progress_bar(comparison.total_bytes, "comparing") as progress:
            differences = list(comparison.differences(progress))
    for note in comparison.notes:
        typer.echo(note, err=True)
    if differences:
        headings = ("in", "name", "what", ">largest |a − b|", ">of max(|a|, |b|)", ">entries")
        show_table("", headings, map(_difference_cells, differences))
        verdict = f"{len(differences)} differences"
    else:
        verdict = (
            f"no entry differs by more than {tolerance:g} of its tensor" if tolerance else "equal to the bit"
        )
    typer.echo(verdict)
    raise typer.Exit(1 if differences else 0)


@checkpoint.command()
def verify(directory: Folder) -> None:
    """Read every byte of a checkpoint: check that all files exist, match their hashes, and fit together.

    Of a Hugging Face folder the index and the config are compared with the files. Exit status: 0 valid, 1 damaged
    (each file and tensor is named), 2 bad arguments.
    """
    (folder,) = checkpoint_folders("verify", directory)
    with reported("verify"):  # an unreadable file may be valid
        findings = examined(folder)
    for note in findings.notes:
        typer.echo(f"note: {note}", err=True)
    for error in findings.errors:
        typer.echo(error)
    typer.echo(f"{folder} is {'damaged' if findings.errors else 'sound'}")
    raise typer.Exit(1 if findings.errors else 0)


REMOVED = {
    "reshard": "a step loads under every layout and precision as it is. For other files load it by "
    "booster.load_checkpoint and save it by booster.save_checkpoint(..., size_per_shard=MIB)",
    "export": "`model/` in the folder of a step is a Hugging Face folder already, so copy it. For another format save "
    "what AutoModel.from_pretrained(FOLDER, dtype=...) returned; for the float32 masters of 16-bit weights load the "
    'step under precision="fp32" and call booster.save_model(..., shard=True)',
}


def removed(context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Refuse a command that was removed, and name its replacement."""
    name = str(context.info_name)
    refuse(f"checkpoint {name}", [f"there is no such command any more: {REMOVED[name]}"])


for _name in REMOVED:
    checkpoint.command(_name, hidden=True, context_settings={"ignore_unknown_options": True})(removed)


def checkpoint_folders(command: str, *paths: Path, errors: Sequence[str] = ()) -> list[Path]:
    """Return the checkpoint folders of some paths, and name those on stderr that are not the given ones.

    Ends the command with all errors if one is missing.
    """
    from ..checkpoint.inspection import find_folder

    folders, errors = [], list(errors)
    for path in paths:
        try:
            folder = find_folder(path)
        except (ValueError, OSError) as error:
            errors.append(str(error))
            continue
        folders.append(folder)
        if folder != path:
            typer.echo(f"{path}: the newest complete step is {folder.name}", err=True)
    refuse(f"checkpoint {command}", errors)
    return folders


def examined(folder: Path) -> "Findings":
    """Read every byte of a checkpoint, and return all damage."""
    from ..checkpoint.inspection import examine

    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    with progress_bar(total, "reading") as progress:
        return examine(folder, progress=progress)


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Report errors of reading and writing, and exit with status 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"echelon checkpoint {command}: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show the number of bytes on stderr, if it is a terminal."""
    from tqdm import tqdm

    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False
    ) as bar:
        yield bar.update


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print a checkpoint's metadata, its kinds of tensors and its files."""
    from ..checkpoint.inspection import plain

    facts = [
        (name, value if isinstance(value, str) else json.dumps(plain(value)))
        for name, value in _facts(summary)
        if value is not None
    ]
    show_table(summary["path"], ("", ""), facts)
    sizes = (
        (
            kind["name"],
            f"{kind['tensors']:,}",
            f"{kind['entries']:,}",
            shown_bytes(kind["bytes"]),
            _formats(kind["dtypes"]),
        )
        for kind in summary["parts"]
    )
    show_table("tensors", ("of", ">tensors", ">entries", ">size", "formats"), sizes)
    files = summary["files"]
    total = shown_bytes(sum(file["bytes"] for file in files))
    show_table(
        f"files: {len(files)}, {total}",
        ("file", ">size"),
        ((file["path"], shown_bytes(file["bytes"])) for file in files),
    )


def _facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a checkpoint's metadata; None for what it has not."""
    from ..checkpoint.inspection import plain

    yield "step", summary["step"]
    yield "written by", summary["echelon"] and f"echelon {summary['echelon']}"
    yield "model", summary["model_class"]
    for name in ("layout", "optimizer"):
        yield name, summary[name]
    for number, group in enumerate(summary["groups"]):
        yield f"group {number}", f"{group['parameters']} parameters, {json.dumps(plain(group['options']))}"
    for name in ("scheduler", "scaler", "skipped_steps", "data", "user"):
        yield name.replace("_", " "), summary[name]
    ranks = list(summary["random"])
    if len(ranks) > 8:
        ranks = [*ranks[:4], "…", ranks[-1]]
    yield "random states", "; ".join(ranks) or None


def _formats(sizes: Mapping[str, int]) -> str:
    if len(sizes) == 1:
        return next(iter(sizes))
    return ", ".join(f"{dtype} {shown_bytes(size)}" for dtype, size in sizes.items())


def _difference_cells(difference: "Difference") -> tuple[str, ...]:
    """Return the row of a difference in the table."""
    distance = difference.distance
    if distance is None:
        return difference.kind, difference.name, difference.what, "", "", ""
    return (
        difference.kind,
        difference.name,
        difference.what,
        f"{distance.absolute:.3g}",
        f"{distance.relative:.3g}",
        f"{distance.differing:,} of {distance.entries:,}",
    )


def shown_bytes(count: int) -> str:
    """Format a number of bytes with its unit."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
