"""Start of processes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def torchrun(num_processes: int) -> list[str]:
    """The words before a script that start so many processes of it on this machine."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)),
    ]


def run(name: str, words: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, quietly, with one thread a process unless this process was told otherwise.

    Args:
        name: what it is called in the error.
        words: the command.
        environment: what it gets besides.

    Raises:
        RuntimeError: it failed.
    """
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {done.stderr[-4000:]}")
