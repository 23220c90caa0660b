"""A pool of worker processes for distributed tests.

    def sum_of_ranks() -> int:                      # top level: workers import it by name
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return int(total)

    def test_ranks_are_summed(pool):
        assert pool.run(4, sum_of_ranks) == [6] * 4

    @on_ranks(4)                                    # the same, if the ranks check everything
    def test_every_rank_has_the_sum():
        assert sum_of_ranks() == 6

Workers live for the whole session, since importing torch and transformers takes seconds. They are forked from a server
that has imported both and has no threads. Every run gets a process group of its own over gloo.
"""

import contextlib
import functools
import inspect
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .worker import Outcome, Task, serve, warning_filters

# Imported once by the fork server: modules that nearly every distributed test needs.
PRELOADED = (
    "pytest",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.testing",
    "torch.utils.checkpoint",
    "echelon.verify.parity",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
CLEANUP_SECONDS = 10.0
_CONSEQUENCE = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket")


class RankDied(RuntimeError):
    """A worker process ended during a test."""


class RankHung(RuntimeError):
    """A rank did not end in time; the message has its stack. Its process was killed."""


class RankTracebacks(Exception):
    """Tracebacks of all failed ranks as text; the cause of an exception that a run raises."""


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks: Path

    def send(self, message: Any) -> None:
        # Whoever waits for the answer of a dead worker reports its death.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(message))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process.close()

    def where(self) -> str:
        """Return the current stacks of the worker's threads."""
        before = self.stacks.read_text()
        os.kill(self.process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
        deadline = time.monotonic() + 2
        while self.stacks.read_text() == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)  # the first bytes have arrived: the rest follows at once
        text = self.stacks.read_text()
        return text[len(before) :] or "(its stack could not be had)"


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Failure of one rank; `when` orders failures in time."""

    rank: int
    error: BaseException
    text: str
    when: float

    @property
    def is_consequence(self) -> bool:
        """Return True if the failure of another rank explains this one: a broken connection, or the wait for it."""
        if isinstance(self.error, RankHung) or type(self.error).__name__ == "RankFailure":
            return True
        message = str(self.error).lower()
        is_communication = isinstance(self.error, dist.DistError | RuntimeError | ConnectionError)
        return (
            is_communication
            and not isinstance(self.error, RankDied)
            and any(s in message for s in _CONSEQUENCE)
        )


class Pool:
    """Worker processes, started when first needed, as many as the largest run.

    Args:
        grace: seconds that the other ranks may continue after one has failed.
    """

    def __init__(self, *, grace: float = 15.0) -> None:
        self._grace = grace
        self._workers: list[_Worker] = []
        self._names = (f"run-{number}" for number in itertools.count())
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-pool-"))
        self._store = _local_store()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank of a new process group.

        Args:
            world_size: number of ranks.
            function: importable by name. The function, its arguments and its results are pickled.
            timeout: seconds after which the run fails. Collectives wait longer: the stacks of the ranks say more.

        Returns:
            The return values by rank.

        Raises:
            Exception: the exception of the first rank that failed. Its cause is a `RankTracebacks` with the tracebacks
                of all failed ranks.
            RankDied: a worker process ended.
            RankHung: the timeout passed; the message has the stack of every rank.
        """
        __tracebackhide__ = True
        values, failures = self._run(world_size, function, args, kwargs, timeout)
        if failures:
            first = _first(failures)
            raise first.error from RankTracebacks(_report(failures, first))
        return values

    def run_failing(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[BaseException | None]:
        """Run like `run`, but return the failure of each rank: its exception, RankDied, RankHung, or None."""
        failures = self._run(world_size, function, args, kwargs, timeout)[1]
        errors: list[BaseException | None] = [None] * world_size
        for failure in failures:
            failure.error.__cause__ = RankTracebacks(failure.text)
            errors[failure.rank] = failure.error
        return errors

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.send(None)
        for worker in self._workers:
            worker.process.join(CLEANUP_SECONDS)
            worker.kill()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(
        self, world_size: int, function: Callable, args: tuple, kwargs: dict[str, Any], timeout: float
    ) -> tuple[list[Any], list[_Failure]]:
        call = pickle.dumps((function, args, kwargs))
        while len(self._workers) < world_size:
            self._workers.append(self._start(len(self._workers)))
        workers = self._workers[:world_size]
        name, filters = next(self._names), warning_filters()
        try:
            for rank, worker in enumerate(workers):
                worker.send(
                    Task(
                        name=name,
                        rank=rank,
                        world_size=world_size,
                        port=self._store.port,
                        timeout=timeout + self._grace,
                        call=call,
                        filters=filters,
                    )
                )
            values, failures = _Collection(workers, timeout=timeout, grace=self._grace).collect()
            failures += self._clean(workers, {failure.rank for failure in failures if _is_gone(failure)})
        except BaseException:  # Ctrl-C, or a value that does not unpickle: the state of the ranks is unknown
            for rank in range(world_size):
                self._replace(rank)
            raise
        return values, failures

    def _clean(self, workers: list[_Worker], gone: set[int]) -> list[_Failure]:
        """Let finished ranks leave their group and replace the others; return the failures to leave."""
        left = {rank: worker for rank, worker in enumerate(workers) if rank not in gone}
        for worker in left.values():
            worker.send("all ended")
        deadline = time.monotonic() + CLEANUP_SECONDS
        failures = []
        for rank, worker in left.items():
            if not (worker.connection.poll(max(0, deadline - time.monotonic())) and _is_clean(worker)):
                failures.append(_stopped(rank, worker, "did not leave its process group"))
        for rank in gone | {failure.rank for failure in failures}:
            self._replace(rank)
        return failures

    def _start(self, index: int) -> _Worker:
        connection, far_end = self._context.Pipe()
        stacks = self._folder / f"stacks-{index}-{time.monotonic_ns()}"
        process = self._context.Process(
            target=serve, args=(far_end, str(stacks)), name=f"test worker {index}", daemon=True
        )
        process.start()
        far_end.close()
        return _Worker(process=process, connection=connection, stacks=stacks)

    def _replace(self, rank: int) -> None:
        self._workers[rank].kill()
        self._workers[rank] = self._start(rank)


def on_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on every rank of a new process group, with the test's parameters; see `Pool.run`."""

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(pool: Pool, **parameters: Any) -> None:
            __tracebackhide__ = True
            pool.run(world_size, _run_body, test, parameters, **options)

        of_body = inspect.signature(body)
        fixture = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = of_body.replace(parameters=[fixture, *of_body.parameters.values()])  # type: ignore[attr-defined]
        return test

    return decorated


def _run_body(test: Any, parameters: dict[str, Any]) -> None:
    test.__wrapped__(**parameters)


class _Collection:
    """Collector of the outcomes of one run."""

    def __init__(self, workers: list[_Worker], *, timeout: float, grace: float) -> None:
        self._waiting = dict(enumerate(workers))
        self._values: list[Any] = [None] * len(workers)
        self._failures: list[_Failure] = []
        self._timeout = timeout
        self._grace = grace
        self._deadline = time.monotonic() + timeout

    def collect(self) -> tuple[list[Any], list[_Failure]]:
        """Wait until every rank has ended, stop ranks that do not end, and return values by rank and failures."""
        while self._waiting and (left := self._deadline - time.monotonic()) > 0:
            sources: dict[Any, int] = {}
            for rank, worker in self._waiting.items():
                sources |= {worker.connection: rank, worker.process.sentinel: rank}
            ready = multiprocessing.connection.wait(list(sources), left)
            for rank in {sources[source] for source in ready}:  # type: ignore[index]
                self._take(rank, self._waiting.pop(rank))
        late = f"did not end within {self._timeout:g} s"
        if self._failures:
            late = f"did not end within {self._grace:g} s of another rank's failure"
        self._failures += [_stopped(rank, worker, late) for rank, worker in self._waiting.items()]
        return self._values, self._failures

    def _take(self, rank: int, worker: _Worker) -> None:
        try:
            outcome: Outcome = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._fail(_dead(rank, worker))
            return
        if outcome.kind == "returned":
            self._values[rank] = pickle.loads(outcome.pickled)
        else:
            error = pickle.loads(outcome.pickled)
            self._fail(_Failure(rank=rank, error=error, text=outcome.traceback, when=outcome.when))

    def _fail(self, failure: _Failure) -> None:
        if not self._failures:
            self._deadline = min(self._deadline, time.monotonic() + self._grace)
        self._failures.append(failure)


def _local_store() -> dist.TCPStore:
    """Make a store for this machine only, by IPv4.

    The server looks up the host name of each client. By default it listens by IPv6, where 127.0.0.1 appears as
    ::ffff:127.0.0.1, which is in no /etc/hosts: without a name server every connection takes seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _is_gone(failure: _Failure) -> bool:
    return isinstance(failure.error, RankDied | RankHung)


def _is_clean(worker: _Worker) -> bool:
    try:
        return pickle.loads(worker.connection.recv_bytes()) == "clean"
    except (EOFError, ConnectionResetError):
        return False


def _dead(rank: int, worker: _Worker) -> _Failure:
    worker.process.join(CLEANUP_SECONDS)
    code = worker.process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    text = f"rank {rank}: its process ended in the middle of the test ({how})"
    if stacks := worker.stacks.read_text():
        text += f". It stood at:\n{stacks}"
    return _Failure(rank=rank, error=RankDied(text), text=text, when=time.monotonic())


def _stopped(rank: int, worker: _Worker, why: str) -> _Failure:
    if not worker.process.is_alive():
        return _dead(rank, worker)
    text = f"rank {rank} {why}. It stood at:\n{worker.where()}"
    return _Failure(rank=rank, error=RankHung(text), text=text, when=time.monotonic())


def _first(failures: list[_Failure]) -> _Failure:
    """Return the failure that explains the others: the earliest that is not itself a consequence."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.when))


def _report(failures: list[_Failure], first: _Failure) -> str:
    others = sorted(
        (failure for failure in failures if failure is not first), key=lambda failure: failure.rank
    )
    parts = [f"rank {first.rank} failed first:\n{first.text}"]
    parts += [f"rank {failure.rank} failed too:\n{failure.text}" for failure in others]
    return "\n\n".join(["", *parts])
