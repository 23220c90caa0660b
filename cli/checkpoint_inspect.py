"""`echelon checkpoint inspect`: what is in a checkpoint, as tables or as JSON."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ..checkpoint.inspect import Opened, list_tensors, open_folder, plain, summarize
from .checkpoint_folder import chosen_folder, folder_faults, shown_bytes, told
from .console import refuse, table_console


def run_inspect(directory: Path, pattern: str | None, *, tensors: bool, as_json: bool) -> None:
    """Print a checkpoint's contents; see `checkpoint.inspect`."""
    faults = folder_faults(directory)
    if pattern is not None and not tensors:
        faults.append(f"{pattern!r} is a pattern of names: give --tensors too")
    refuse("checkpoint inspect", faults)
    with told("inspect"):
        opened = open_folder(chosen_folder(directory))
        summary = summarize(opened)
    if as_json:
        listing = {"tensors": list(list_tensors(opened, pattern or "*"))} if tensors else {}
        typer.echo(json.dumps(plain(summary | listing), indent=2))
        return
    console = table_console()
    console.print(_facts(summary))
    console.print(_parts(summary))
    console.print(_files(summary))
    if tensors:
        console.print(_tensors(opened, pattern or "*"))


def _facts(summary: dict[str, Any]) -> Table:
    table = Table(title=summary["path"], title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _lines(summary):
        if value is not None:
            table.add_row(name, value if isinstance(value, str) else json.dumps(plain(value)))
    return table


def _lines(summary: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "step", summary["step"]
    yield "written by", summary["echelon"] and f"echelon {summary['echelon']}"
    yield "model", summary["model_class"]
    yield "layout", summary["layout"]
    yield "optimizer", summary["optimizer"]
    for number, group in enumerate(summary["groups"]):
        yield f"group {number}", f"{group['parameters']} parameters, {json.dumps(plain(group['options']))}"
    yield "scheduler", summary["scheduler"]
    yield "scaler", summary["scaler"]
    yield "skipped steps", summary["skipped_steps"]
    yield "data", summary["data"]
    yield "user", summary["user"]
    yield "random states", _ranks(summary["random"]) if summary["random"] else None


def _ranks(places: Sequence[str]) -> str:
    """Which ranks, shortened in the middle."""
    if len(places) > 8:
        places = [*places[:4], "…", places[-1]]
    return "; ".join(places)


def _parts(summary: dict[str, Any]) -> Table:
    table = Table(title="tensors", title_justify="left")
    table.add_column("of")
    for heading in ("tensors", "entries", "size"):
        table.add_column(heading, justify="right")
    table.add_column("formats")
    for part in summary["parts"]:
        formats = ", ".join(f"{dtype} {shown_bytes(size)}" for dtype, size in part["dtypes"].items())
        numbers = (f"{part['tensors']:,}", f"{part['entries']:,}", shown_bytes(part["bytes"]))
        table.add_row(part["name"], *numbers, formats if len(part["dtypes"]) > 1 else "".join(part["dtypes"]))
    return table


def _files(summary: dict[str, Any]) -> Table:
    total = sum(file["bytes"] for file in summary["files"])
    table = Table(title=f"files: {len(summary['files'])}, {shown_bytes(total)}", title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right")
    for file in summary["files"]:
        table.add_row(file["path"], shown_bytes(file["bytes"]))
    return table


def _tensors(opened: Opened, pattern: str) -> Table:
    table = Table(title=f"tensors {pattern}", title_justify="left")
    for heading in ("tensor", "shape", "format", "files"):
        table.add_column(heading, overflow="fold")
    for line in list_tensors(opened, pattern):
        table.add_row(line["name"], str(list(line["shape"])), line["dtype"], ", ".join(line["files"]))
    return table
