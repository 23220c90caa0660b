"""Memory that is kept until other processes have read it."""

import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import process_memory, readers
from echelon.cluster.exchange import exchange_of
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.process_memory import Neighbours
from echelon.cluster.readers import Readers

from ..pool import Pool

LENGTH = 2**18


@contextmanager
def nothing_left() -> Iterator[None]:
    with patch.object(readers, "_LEFT", []):
        yield


def leave(pid: int, others: ctypes.c_int64) -> int:
    """How many things stay when a rank drops the third that it has shown to a process that has read so many."""
    own = Readers(Neighbours({1: pid}), ctypes.c_int64(0), {1: ctypes.addressof(others)})
    own.shown = 3
    own.keep([torch.ones(3)])
    return len(readers._LEFT)


@nothing_left()
def test_memory_stays_until_the_others_have_read_it_or_are_gone() -> None:
    count = ctypes.c_int64(2)
    assert leave(os.getpid(), count) == 1
    count.value = 3
    assert leave(os.getpid(), count) == 0, "what was left before goes too"
    dead = multiprocessing.get_context("fork").Process(target=int)
    dead.start()
    dead.join()
    assert dead.pid is not None
    assert leave(dead.pid, ctypes.c_int64(2)) == 0


@nothing_left()
def test_a_process_that_ends_waits_for_others_but_not_for_ever() -> None:
    count = ctypes.c_int64(2)
    assert leave(os.getpid(), count) == 1
    reader = threading.Timer(0.2, lambda: setattr(count, "value", 3))
    reader.start()
    start = time.monotonic()
    readers._wait_for_all()
    assert 0.1 < time.monotonic() - start < 5
    count.value = 2
    with patch.object(readers, "_PATIENCE_SECONDS", 0.1):
        readers._wait_for_all()


SCRIPT = """
import ctypes, os
import torch
from echelon.cluster.process_memory import Neighbours
from echelon.cluster.readers import Readers, _LEFT, _wait_for_all
from weakref import finalize
finalize(Readers, _wait_for_all)
count = ctypes.c_int64(0)
own = Readers(Neighbours({1: os.getpid()}), ctypes.c_int64(0), {1: ctypes.addressof(count)})
own.shown = 1
own.keep([torch.ones(3)])
assert _LEFT
raise LookupError("in the middle of a step")
"""


def test_a_process_that_an_error_ends_waits_for_nobody() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "in the middle of a step" in ended.stderr


LAST = """
import ctypes, os, sys
import torch
from echelon.cluster.process_memory import Neighbours
from echelon.cluster.readers import _COUNTS, _LEFT, Readers, _wait_for_all
from weakref import finalize
finalize(Readers, _wait_for_all)
count = ctypes.c_int64(0)
_COUNTS.append(count)
print(os.getpid(), ctypes.addressof(count), flush=True)
pid, place = (int(number) for number in sys.stdin.readline().split())
own = Readers(Neighbours({1: pid}), count, {1: place})
own.shown = 1
own.keep([torch.ones(3)])
assert _LEFT
print("left", flush=True)
sys.stdin.readline()
"""


def test_two_processes_that_end_do_not_wait_for_each_other() -> None:
    """Each has left what the other one has not read, and will not."""
    ranks = [subprocess.Popen([sys.executable, "-c", LAST], stdin=-1, stdout=-1, text=True) for _ in range(2)]
    try:
        places = [answer(rank) for rank in ranks]
        for rank, place in zip(ranks, reversed(places), strict=True):
            tell(rank, place)
        assert [answer(rank) for rank in ranks] == ["left\n"] * 2
        for rank in ranks:
            tell(rank, "end\n")
        assert [rank.wait(timeout=30) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


@pytest.mark.parametrize("reads", [True, False], ids=["read", "sent"])
def test_what_one_rank_drops_before_the_others_look_is_there(pool: Pool, reads: bool) -> None:
    pool.run(2, check_dropped, reads)


def check_dropped(reads: bool) -> None:
    """The first rank drops exchange and mesh, and has other use for the memory; then the second one looks."""
    mesh = ParallelMesh()
    with patch.object(
        process_memory, "_PROCESS_VM_READV", process_memory._PROCESS_VM_READV if reads else None
    ):
        exchange = exchange_of(mesh, mesh.group("dp"))
    flats = [torch.full((2 * LENGTH,), 1.0 + dist.get_rank()) for _ in range(2)]
    works = [exchange.all_gather_later_(flat) for flat in flats]
    if dist.get_rank() == 0:
        del works, exchange, mesh
        gc.collect()
        rest = [torch.full((LENGTH,), -1e9) for _ in range(16)]  # where the memory was, if it is free
        assert len(rest) == 16
    dist.barrier()
    if dist.get_rank() == 1:
        for work, flat in zip(works, flats, strict=True):
            work.wait()
            assert flat.unique().tolist() == [1, 2]
        del work, works, exchange, mesh
        gc.collect()
    dist.barrier()
    readers._LEFT[:] = [left for left in readers._LEFT if not left[0].are_done()]
    assert not readers._LEFT
