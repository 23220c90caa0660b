"""Ranks forked from this process: they begin with all that it has imported, built and derived."""

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from echelon.cluster.errors import RankFailure
from echelon.cluster.launch import join_local_group, local_store

from .records import FOLDER

STACKS = FOLDER / "stacks"
GRACE = 5.0  # seconds that the other ranks may go on after one has failed


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why ranks did not all return: in words, and True if all of them raised ValueErrors, as refusals are."""

    why: str
    is_refusal: bool = False


@dataclass(frozen=True)
class _Raised:
    why: str
    is_value_error: bool = False
    is_consequence: bool = False  # of the failure of another rank
    when: float = field(default_factory=time.monotonic)


def run_forked(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float
) -> list[Any] | Failure:
    """Call a function on new ranks of a gloo group; return its values by rank, or why there are none.

    Args:
        world_size: number of ranks.
        function: called with `arguments`; its values are pickled.
        seconds: time until ranks that still run are killed.
    """
    context = multiprocessing.get_context("fork")
    ranks, processes = {}, []
    for rank in range(world_size):
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, rank, world_size, seconds, function, arguments), daemon=True
        )
        process.start()
        there.close()
        ranks[here] = rank
        processes.append(process)
    store = local_store()  # after the forks: it has threads, whose locks would be held in the ranks for ever
    for connection in ranks:
        connection.send(store.port)
    try:
        answers = _collected(ranks, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    raised = [answer for answer in answers.values() if isinstance(answer, _Raised)]
    if raised:
        first = min(raised, key=lambda failure: (failure.is_consequence, failure.when))
        is_refusal = len(raised) == world_size and all(failure.is_value_error for failure in raised)
        return Failure(why=first.why, is_refusal=is_refusal)
    if missing := sorted(set(range(world_size)) - answers.keys()):
        return Failure(why=f"ranks {missing} did not end within {seconds:g} s")
    return [answers[rank] for rank in range(world_size)]


def _collected(ranks: dict[Connection, int], deadline: float) -> dict[int, Any]:
    """Return the answers that come in time, by rank; after a failure only those that come soon."""
    waiting, answers = dict(ranks), dict[int, Any]()
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting.pop(connection)  # type: ignore[arg-type]
            try:
                answers[rank] = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = _Raised(f"rank {rank} died: it passed a limit of time or memory, or crashed")
            if isinstance(answers[rank], _Raised):
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _serve(
    parent: Connection,
    rank: int,
    world_size: int,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Send the value of the function on this rank, or what it raises; one that hangs writes its stack to `STACKS`."""
    port = parent.recv()
    STACKS.mkdir(parents=True, exist_ok=True)
    stacks = (STACKS / f"{os.getppid()}-{rank}.txt").open("w")
    faulthandler.dump_traceback_later(0.9 * seconds, file=stacks)
    try:
        with join_local_group(rank, world_size, port=port, timeout_seconds=seconds):
            try:
                parent.send(function(*arguments))
            except BaseException as error:
                # Sent before this rank leaves the group, with which it would break the calls of the others.
                parent.send(_raised(error))
    except BaseException as error:
        parent.send(_raised(error))
    Path(stacks.name).unlink()


def _raised(error: BaseException) -> _Raised:
    first_line = next(iter(str(error).splitlines()), "")
    is_value_error = isinstance(error, ValueError)
    why = first_line if is_value_error else f"{type(error).__name__}: {first_line}"
    return _Raised(why, is_value_error, isinstance(error, RankFailure) or "onnection" in str(error))
