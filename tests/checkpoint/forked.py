"""Ranks that may be killed: forked from a process that has imported all, since a killed worker of the pool is dear."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..pool import PRELOADED

KILLED = -signal.SIGKILL


def in_warm_process(function: Callable[..., None], *args: Any, seconds: float) -> None:
    """Call a function of a module in a new process that runs no threads, from which ranks can be forked.

    Raises:
        AssertionError: it failed, or took longer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=function, args=args)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.terminate()
        process.join()
    assert process.exitcode == 0, f"{function.__name__} ended with {process.exitcode}; its output says why"


def run_ranks(world: int, function: Callable[..., None], *args: Any, seconds: float = 60.0) -> list[int]:
    """Fork the ranks of a gloo group, which are a process group of the system's too, and wait for them.

    Returns:
        How each ended: 0, 1 where it raised, a signal's number below 0.

    Raises:
        AssertionError: they did not end in time, and were killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids: list[int] = []
        for rank in range(world):
            if (pid := os.fork()) == 0:
                _be(rank, world, pids[0] if pids else 0, Path(folder), function, args)
            os.setpgid(pid, pids[0] if pids else pid)
            pids.append(pid)
        return _ends(pids, seconds)


def _be(rank: int, world: int, leader: int, folder: Path, function: Callable[..., None], args: Any) -> None:
    status = 1
    try:
        os.setpgid(0, leader)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        function(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _ends(pids: list[int], seconds: float) -> list[int]:
    ends: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(ends) < len(pids):
        for pid in set(pids) - set(ends):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ends[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pids[0], signal.SIGKILL)
            raise AssertionError(f"of {len(pids)} ranks {len(ends)} ended within {seconds:g} s")
        time.sleep(0.002)
    return [ends[pid] for pid in pids]
