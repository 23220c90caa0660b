"""Local processes that a command starts for what it runs: each joins a gloo group and gives one answer."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch
import torch.multiprocessing as multiprocessing
import transformers

from ..cluster.launch import join_local_group, local_store

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Answered(Generic[Answer]):
    value: Answer


@dataclass(frozen=True)
class _Failed:
    report: str


def run_on_processes(
    work: Callable[..., Answer], arguments: tuple[Any, ...], *, num_processes: int, timeout_seconds: float
) -> list[Answer] | str:
    """Run a function on processes of one thread each, which form a group, and wait until all have ended.

    Args:
        work: called with the rank and `arguments`; found by its name in its module, as pickle does.
        timeout_seconds: after how long a collective that a peer does not join raises.

    Returns:
        The answer of each rank, or how one failed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    store = local_store()
    processes, readers = [], []
    for rank in range(num_processes):
        reader, writer = context.Pipe(duplex=False)
        join = (rank, num_processes, store.port, timeout_seconds)
        process = context.Process(target=_run, args=(join, work, arguments, writer))
        process.start()
        writer.close()  # so that reading ends when the process does
        processes.append(process)
        readers.append(reader)
    # Before joining: a process does not end until its answer is read.
    answers = [_read(reader) for reader in readers]
    for process in processes:
        process.join()
    if failures := [answer.report for answer in answers if isinstance(answer, _Failed)]:
        return "\n".join(failures)
    values = [answer.value for answer in answers if isinstance(answer, _Answered)]
    if len(values) < num_processes:
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        return f"processes ended without an answer; the exit codes by rank are {codes}"
    return values


def _read(reader: Connection) -> "_Answered | _Failed | None":
    """The answer of a process, None where it ended before."""
    try:
        return reader.recv()
    except EOFError:
        return None


def _run(
    join: tuple[int, int, int, float],
    work: Callable[..., Answer],
    arguments: tuple[Any, ...],
    writer: Connection,
) -> None:
    rank, num_processes, port, timeout_seconds = join
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    answer: _Answered[Answer] | _Failed
    try:
        with join_local_group(rank, num_processes, port=port, timeout_seconds=timeout_seconds):
            answer = _Answered(work(rank, *arguments))
    except Exception:  # the parent prints it and sets the exit status
        answer = _Failed(f"rank {rank} failed:\n{traceback.format_exc()}")
    writer.send(answer)
