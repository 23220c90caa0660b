"""`echelon explain`: where the ranks of a hanging run came apart, by the dumps of torch's flight recorder.

torch is imported inside functions, so that help needs no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from .console import refuse


def explain(
    folder: Annotated[Path, typer.Argument(help="Folder with the dumps of all ranks, one file each.")],
) -> None:
    """Name the first collective that ranks did not make alike, and those that each rank still waits in.

    torch writes the dumps when a collective of NCCL times out, if TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE
    (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) are set, as TORCH_NCCL_DEBUG_INFO_TEMP_FILE followed by the rank.
    """
    from ..cluster.flight_recorder import explain_dumps, read_dumps

    try:
        dumps = read_dumps(folder)
    except (OSError, ValueError) as error:
        refuse("explain", [str(error)])
        return
    for line in explain_dumps(dumps):
        typer.echo(line)
