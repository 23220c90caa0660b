"""Processes of a test that run at the same time."""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """The status of an ended process, and what it printed."""

    status: int
    out: str
    err: str


def run_together(
    commands: Sequence[list[str]], environments: Sequence[Mapping[str, str]], *, cwd: Path, seconds: float
) -> list[Ended]:
    """Start all commands, each in an environment, and wait for their ends; on an error they are terminated."""
    with ExitStack() as stack:
        processes = []
        for command, environment in zip(commands, environments, strict=True):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)
            processes.append(stack.enter_context(process))
            stack.callback(process.terminate)  # torchrun ends its processes
        printed = [process.communicate(timeout=seconds) for process in processes]
    return [Ended(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]
