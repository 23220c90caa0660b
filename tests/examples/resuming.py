"""Helpers to interrupt and resume runs of the examples on the ranks of a pool."""

import importlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from ..pool import Pool
from .scripts import EXAMPLES, records_of, run, run_here

# Suffixes of record entries that depend on time and machine.
_MEASURED = ("_per_second", "peak_memory_bytes", "peak_memory_of")


def signalled_here(script: Path, step: int, *arguments: str) -> tuple[int, str]:
    """Call `run_here` and send SIGTERM to the last rank only, as this step of the shared loop begins."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    training = importlib.import_module("training")
    one_step = training.one_step

    def signalled(run: Any, batches: Any, number: int) -> Any:
        if number == step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return one_step(run, batches, number)

    with mock.patch.object(training, "one_step", signalled):
        return run_here(script, *arguments)


def reported_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without figures that depend on the machine."""
    return [
        {name: value for name, value in record.items() if not name.endswith(_MEASURED)} for record in records
    ]


class Trial:
    """Runs of one script in one folder.

    Args:
        folder: folder for the checkpoints and the metrics.
        words: arguments of every run.
    """

    def __init__(self, pool: Pool, script: Path, folder: Path, *words: str) -> None:
        self.pool, self.script, self.folder = pool, script, folder
        self.checkpoints, self.metrics = folder / "checkpoints", folder / "metrics.jsonl"
        saved = ("--save_dir", str(self.checkpoints), "--resume", "auto", "--metrics", str(self.metrics))
        self.words = (*words, *saved)

    def run(self, num_processes: int, *words: str, status: int = 0) -> str:
        """Run with further arguments, check the status and return the first rank's output; others print nothing."""
        return run(self.pool, self.script, *self.words, *words, processes=num_processes, status=status)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the metrics file, see `reported_of`."""
        return reported_of(records_of(self.metrics))

    def steps(self) -> list[int]:
        """Return the saved steps."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.iterdir())

    def forget_after(self, step: int) -> None:
        """Remove later checkpoints, as if the run had been killed before it wrote them."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.checkpoints / f"step-{later:08}")
