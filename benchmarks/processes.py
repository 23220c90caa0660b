"""Start of processes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def torchrun(num_processes: int) -> list[str]:
    """Return the command line prefix that runs a script in this number of processes on this machine."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)),
    ]


def run(name: str, words: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, quietly, with one thread per process unless the environment sets another number.

    Args:
        name: its name in the error.
        words: the command.
        environment: further environment variables.

    Raises:
        RuntimeError: it failed.
    """
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {done.stderr[-4000:]}")
