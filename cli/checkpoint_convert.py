"""`echelon checkpoint reshard` and `export`: a checkpoint written again, in other files or for Hugging Face."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..checkpoint.convert import Export, Resharding, masters_fault, out_fault
from ..checkpoint.opened import Opened, find_folder, open_folder
from ..checkpoint.step_folder import MANIFEST
from .checkpoint_folder import Folder, chosen_folder, folder_faults, progress_bar, shown_bytes, told
from .console import refuse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 2**20

Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="The new folder, which is not there.", show_default=False)
]
Size = Annotated[int, typer.Option(metavar="MIB", help="Of a file of weights at most, in MiB.")]
Dtype = Annotated[
    str | None, typer.Option(help=f"Format of the weights: {', '.join(DTYPES)}; else their own.")
]


def reshard(
    directory: Folder,
    out: Out,
    size_per_shard: Size = 1024,
    optimizer_files: Annotated[
        int | None, typer.Option(help="Files for the optimizer's tensors; else as many as there are.")
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Write the same checkpoint in other files. OUT is complete, hashes and all, or not there.

    With --dtype as a run of that precision would have written it: 16-bit weights have float32 masters beside them,
    float32 weights are their masters. Exit status: 0 written, 1 damaged or not to be written, 2 bad arguments.
    """
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


def export(
    directory: Folder,
    out: Out,
    dtype: Dtype = None,
    masters: Annotated[
        bool, typer.Option("--masters", help="Take the float32 masters of the weights that have one.")
    ] = False,
    size_per_shard: Size = 1024,
) -> None:
    """Write a Hugging Face folder, which AutoModel.from_pretrained and its like read.

    Exit status: 0 written, 1 damaged or not to be written, 2 bad arguments.
    """
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
