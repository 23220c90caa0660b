"""`echelon checkpoint`: what can be done with checkpoints in one process. The commands are in files of their own."""

import typer

from .checkpoint_convert import export, reshard
from .checkpoint_diff import diff
from .checkpoint_inspect import inspect
from .checkpoint_verify import verify

checkpoint = typer.Typer(
    help="Look into checkpoints, compare, check and rewrite them; no process group, one tensor in memory at a time.",
    no_args_is_help=True,
)
for command in (inspect, diff, verify, reshard, export):
    checkpoint.command()(command)
