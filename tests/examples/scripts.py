"""Helpers to run the examples as a user does, on the ranks of the pool."""

import contextlib
import io
import itertools
import json
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

from echelon import Interruption

from ..pool import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 280
FP32 = "--precision fp32"


def run(
    pool: Pool, script: str, *words: str, processes: int = 1, status: int = 0, stop_after: int | None = None
) -> str:
    """Run an example on all ranks, check the exit status, and return the first rank's output; others print nothing.

    Args:
        script: its path below examples/.
        words: its arguments.
        stop_after: the number of steps after which a signal is pretended.
    """
    arguments = (EXAMPLES / script, words, stop_after)
    (code, printed), *others = pool.run(processes, run_here, *arguments, timeout=TIMEOUT_SECONDS)
    assert code == status, printed[-4000:]
    assert others == [(status, "")] * len(others)
    return printed


def run_here(script: Path, words: tuple[str, ...], stop_after: int | None) -> tuple[int, str]:
    """Run a script in this process, a worker of the pool; return its exit status and output with errors."""
    printed, steps = io.StringIO(), itertools.count(1)
    status: int | str | None = 0

    def requested(interruption: Interruption) -> int:
        return signal.SIGTERM if next(steps) == stop_after else 0

    with (
        mock.patch.dict("os.environ", OMP_NUM_THREADS="1"),  # accelerate warns without it
        mock.patch.object(sys, "argv", [str(script), *words]),
        mock.patch.object(Interruption, "requested", requested),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code
    return int(status or 0), printed.getvalue()


def records_of(path: Path) -> list[dict]:
    """Read the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers_of(path: Path) -> list[float]:
    """Return the numbers of a file of JSON lines that do not depend on the machine, in order."""
    names = ("loss", "grad_norm", "eval_loss", "exact", "accuracy", "f1")
    return [record[name] for record in records_of(path) for name in names if name in record]
