"""Run a function on local processes: each joins a gloo group and returns one answer."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.multiprocessing as multiprocessing
import transformers

from ..cluster.launch import join_local_group, local_store

Answer = TypeVar("Answer")


def run_on_processes(
    work: Callable[..., Answer], arguments: tuple[Any, ...], *, num_processes: int, timeout_seconds: float
) -> list[Answer] | str:
    """Run a function on processes of one thread each that form a group, and wait until all have ended.

    Args:
        work: called with the rank and `arguments`; must be importable, for pickle.
        timeout_seconds: timeout of a collective; a rank raises if a peer has not joined by then.

    Returns:
        The answers by rank, or an error message if a rank failed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    store = local_store()
    join = (num_processes, store.port, timeout_seconds)
    with TemporaryDirectory(prefix="echelon-") as folder:
        try:
            multiprocessing.spawn(_run, (join, work, arguments, Path(folder)), nprocs=num_processes)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            return f"rank {error.error_index} failed: {error}"
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(num_processes)]


def _run(
    rank: int,
    join: tuple[int, int, float],
    work: Callable[..., Answer],
    arguments: tuple[Any, ...],
    folder: Path,
) -> None:
    """Join the group of local processes, do the work, and write its result to a file named by the rank."""
    num_processes, port, timeout_seconds = join
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with join_local_group(rank, num_processes, port=port, timeout_seconds=timeout_seconds):
        torch.save(work(rank, *arguments), folder / str(rank))
