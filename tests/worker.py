"""Worker process of the test pool: it runs tasks that pool.py sends."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import foreign_warnings


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of one rank: `call` is a pickled (function, arguments, keyword arguments)."""

    name: str
    rank: int
    world_size: int
    port: int
    timeout: float
    call: bytes
    filters: list[tuple[str, str, type[Warning], str, int]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one rank: `pickled` is its return value or its exception. `when` is on the machine's clock."""

    kind: Literal["returned", "raised"]
    pickled: bytes
    traceback: str
    when: float


def warning_filters() -> list[tuple[str, str, type[Warning], str, int]]:
    """Return the warning filters of this process, in the form of `Task.filters`."""
    return [
        (action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def serve(connection: Connection, stacks: str) -> None:
    """Run tasks from the connection until it closes or sends None.

    SIGUSR1 and fatal signals write the stacks of all threads to the file `stacks`.

    Per task the worker sends an `Outcome`, waits for the message that all ranks have ended, cleans up and sends
    "clean". It waits because a group that one rank destroys early would fail the others. After an exception it leaves
    the group at once, so ranks that wait for it fail instead of hanging.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, which signals all
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    foreign_warnings.install()
    gc.freeze()  # objects imported before the fork are excluded from garbage collection after each test
    environment = dict(os.environ)
    with open(stacks, "w") as file:
        faulthandler.enable(file)  # of a fatal signal
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            while (task := pickle.loads(connection.recv_bytes())) is not None:
                outcome = _outcome(task)
                connection.send_bytes(pickle.dumps(outcome))
                if outcome.kind == "raised":
                    _leave_group()
                connection.recv_bytes()
                _leave_group()
                _restore(environment)
                connection.send_bytes(pickle.dumps("clean"))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the parent has ended
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _end_with_parent() -> None:
    """Exit when the parent has ended: within a test the worker would not notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(task: Task) -> Outcome:
    with warnings.catch_warnings():
        _apply(task.filters)
        try:
            value = _run(task)
            return Outcome(kind="returned", pickled=pickle.dumps(value), traceback="", when=time.monotonic())
        except BaseException as error:  # SystemExit too: a worker outlives its tests
            when = time.monotonic()
            text = "".join(traceback.format_exception(error))
            return Outcome(kind="raised", pickled=_pickled(error), traceback=text, when=when)


def _run(task: Task) -> Any:
    function: Callable[..., Any]
    function, args, kwargs = pickle.loads(task.call)
    os.environ.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.port),
    )
    _seed(0)
    timeout = timedelta(seconds=task.timeout)
    store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "cpu:gloo",
        store=dist.PrefixStore(task.name, store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=timeout,
    )
    _wait_until_all_have_joined(dist.PrefixStore(task.name, store), task.world_size)
    return function(*args, **kwargs)


def _wait_until_all_have_joined(store: dist.Store, world_size: int) -> None:
    """Wait for all ranks: a rank whose test fails at once would close connections that others still open."""
    if store.add("joined", 1) == world_size:
        store.set("all joined", "")
    store.wait(["all joined"])


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # it was not joined: torch counts it nevertheless, and would expect another name for the next one
        distributed_c10d._world.group_count = 0
    gc.collect()  # connections close with the last reference to their group
    gc.freeze()  # what is left stays, most of it modules: the next collection need not visit it


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    _seed(0)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _pickled(error: BaseException) -> bytes:
    """Pickle the exception, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _pattern(expression: str | re.Pattern[str] | None) -> str:
    return expression.pattern if isinstance(expression, re.Pattern) else expression or ""


def _apply(filters: list[tuple[str, str, type[Warning], str, int]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(action, message, category, module, line, append=True)  # type: ignore[arg-type]
