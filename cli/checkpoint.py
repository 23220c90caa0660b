"""`echelon checkpoint`: the options of its commands. The work is in files of their own, which import torch."""

from pathlib import Path
from typing import Annotated

import typer

FOLDER_HELP = "A step-… folder, the folder above (its newest complete step), or a Hugging Face folder."
Folder = Annotated[Path, typer.Argument(metavar="DIR", help=FOLDER_HELP, show_default=False)]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="The new folder, which is not there.", show_default=False)
]
Size = Annotated[int, typer.Option(metavar="MIB", help="Of a file of weights at most, in MiB.")]
Dtype = Annotated[
    str | None, typer.Option(help="Format of the weights: float32, bfloat16, float16; else their own.")
]

checkpoint = typer.Typer(
    help="Look into checkpoints, compare, check and rewrite them; no process group, one tensor in memory at a time.",
    no_args_is_help=True,
)


@checkpoint.command()
def inspect(
    directory: Folder,
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATTERN]", help="With --tensors: of their names, as a shell's: '*.layers.0.*'."
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List tensors, with their files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a checkpoint. No tensor is read.

    Exit status: 0 shown, 1 something is damaged, 2 bad arguments.
    """
    from .checkpoint_inspect import run_inspect

    run_inspect(directory, pattern, tensors=tensors, as_json=as_json)


@checkpoint.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=FOLDER_HELP, show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Likewise; another layout may have written it.")],
    tolerance: Annotated[
        float,
        typer.Option(help="Let |a − b| be this share of a tensor's largest entry; with 0 every bit counts."),
    ] = 0.0,
) -> None:
    """Compare two checkpoints: tensors, options of the optimizer, scheduler, position in the data, and all else.

    Of Hugging Face folders the models alone. Exit status: 0 nothing differs, 1 something does or is damaged,
    2 bad arguments.
    """
    from .checkpoint_diff import run_diff

    run_diff(a, b, tolerance=tolerance)


@checkpoint.command()
def verify(directory: Folder) -> None:
    """Read every byte of a checkpoint: all files are there, their hashes are right, and they fit together.

    Of a Hugging Face folder the index and the config are compared with the files. Exit status: 0 sound, 1 damaged
    (each file and tensor is named), 2 bad arguments.
    """
    from .checkpoint_verify import run_verify

    run_verify(directory)


@checkpoint.command()
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
    from .checkpoint_convert import run_reshard

    run_reshard(directory, out, size_per_shard=size_per_shard, optimizer_files=optimizer_files, dtype=dtype)


@checkpoint.command()
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
    from .checkpoint_convert import run_export

    run_export(directory, out, dtype=dtype, masters=masters, size_per_shard=size_per_shard)
