"""`echelon checkpoint reshard` and `export`: a checkpoint written again, in other files or for Hugging Face."""

from collections.abc import Callable
from pathlib import Path

import torch
import typer

from ..checkpoint.convert import Export, Resharding, masters_fault, out_fault
from ..checkpoint.opened import Opened, find_folder, open_folder
from ..checkpoint.step_folder import MANIFEST
from .checkpoint_folder import chosen_folder, folder_faults, progress_bar, shown_bytes, told
from .console import refuse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 2**20


def run_reshard(
    directory: Path, out: Path, *, size_per_shard: int, optimizer_files: int | None, dtype: str | None
) -> None:
    """Write the same checkpoint in other files; see `checkpoint.reshard`."""
    faults = [*folder_faults(directory), *_faults(directory, out, size_per_shard, dtype)]
    if optimizer_files is not None and optimizer_files < 1:
        faults.append(f"optimizer-files={optimizer_files} must be at least 1")
    if not folder_faults(directory) and not (find_folder(directory) / MANIFEST).is_file():
        faults.append(f"{directory} is a Hugging Face folder: `echelon checkpoint export` writes those anew")
    refuse("checkpoint reshard", faults)
    with told("reshard"):
        opened = open_folder(chosen_folder(directory))
        resharding = Resharding(
            opened=opened,
            out=out,
            max_bytes=size_per_shard * MIB,
            optimizer_files=optimizer_files or _num_optimizer_files(opened),
            dtype=DTYPES.get(dtype or ""),
        )
        _run(resharding.write, resharding.total_bytes, out)


def run_export(directory: Path, out: Path, *, dtype: str | None, masters: bool, size_per_shard: int) -> None:
    """Write a Hugging Face folder; see `checkpoint.export`."""
    refuse("checkpoint export", [*folder_faults(directory), *_faults(directory, out, size_per_shard, dtype)])
    with told("export"):
        opened = open_folder(chosen_folder(directory))
        fault = masters_fault(opened) if masters else None
        refuse("checkpoint export", [fault] if fault else [])
        made = Export(
            opened=opened,
            out=out,
            max_bytes=size_per_shard * MIB,
            dtype=DTYPES.get(dtype or ""),
            masters=masters,
        )
        _run(made.write, made.total_bytes, out)


def _faults(directory: Path, out: Path, size_per_shard: int, dtype: str | None) -> list[str]:
    faults = [fault] if (fault := out_fault(out, directory)) else []
    if size_per_shard < 1:
        faults.append(f"size-per-shard={size_per_shard} must be at least 1 (MiB)")
    if dtype is not None and dtype not in DTYPES:
        faults.append(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    return faults


def _num_optimizer_files(opened: Opened) -> int:
    states = opened.optimizer
    if states is None:
        return 1
    return max(len({stored.file for boxes in states.boxes.values() for stored in boxes}), 1)


def _run(write: Callable, total_bytes: int, out: Path) -> None:
    with progress_bar(total_bytes, f"writing {out.name}") as progress:
        write(progress)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"{out}: {shown_bytes(size)}")
