"""`echelon checkpoint`: the options of its commands. The work is in files of their own, which import torch."""

from pathlib import Path
from typing import Annotated

import typer

FOLDER_HELP = "A step-… folder, the folder above (its newest complete step), or a Hugging Face folder."
Folder = Annotated[Path, typer.Argument(metavar="DIR", help=FOLDER_HELP, show_default=False)]

checkpoint = typer.Typer(
    help="Look into checkpoints, compare and check them; no process group, one tensor in memory at a time.",
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


def _removed(command: str, instead: str) -> None:
    @checkpoint.command(command, hidden=True, context_settings={"ignore_unknown_options": True})
    def removed(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        from .console import refuse

        refuse(f"checkpoint {command}", [f"there is no such command any more: {instead}"])


_removed(
    "reshard",
    "a step loads under every layout and precision as it is. For other files load it by booster.load_checkpoint and "
    "save it by booster.save_checkpoint(..., size_per_shard=MIB)",
)
_removed(
    "export",
    "`model/` in the folder of a step is a Hugging Face folder already, so copy it. For another format save what "
    "AutoModel.from_pretrained(FOLDER, dtype=...) returned; for the float32 masters of 16-bit weights load the step "
    'under precision="fp32" and call booster.save_model(..., shard=True)',
)
