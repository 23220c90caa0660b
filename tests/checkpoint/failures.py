"""Injected failures: killed processes, full disks and flipped bits, at every possible place.

`at_every_write` counts the calls by which a process changes files. A `Point` makes one of them fail (`full_disk_at`) or
kills the process there (`kill_rank_at`). `flip_every_file` flips bits. `run_ranks` forks ranks that may be killed, from
a process that has imported everything: a killed worker of the pool would be slow to replace.
"""

import builtins
import errno
import gc
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from ..pool import PRELOADED

KILLED = -signal.SIGKILL
Point = Callable[[int, str], None]
Harm = Callable[[Path], object]
_ON_PATHS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir")


@contextmanager
def at_every_write(folder: Path, point: Point) -> Iterator[list[str]]:
    """Call `point` before each call that changes files, and in the middle of each write.

    Args:
        folder: calls for files elsewhere are ignored.
        point: called with the number of the call, from 1, and its description. The call raises the error of `point`.

    Returns:
        The list of calls, in order; it grows during the block.
    """
    calls: list[str] = []
    lock = threading.Lock()

    def note(what: str) -> None:
        with lock:
            calls.append(what)
            number = len(calls)
        point(number, what)

    with ExitStack() as patches:
        for name in _ON_PATHS:
            patches.enter_context(patch.object(os, name, _on_path(getattr(os, name), name, folder, note)))
        patches.enter_context(patch.object(os, "fsync", _fsync(folder, note)))
        for module in (builtins, io):
            patches.enter_context(patch.object(module, "open", _open(folder, note)))
        yield calls


def full_disk_at(number: int) -> Point:
    """Return a point from which on no file can be created or written."""

    def point(called: int, what: str) -> None:
        if called >= number and what.split()[0] in ("open", "write", "fsync", "mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what.split()[-1])

    return point


def kill_rank_at(rank: int, number: int, *, with_others: bool = False) -> Point:
    """Return a point that kills a rank, or with `with_others` all ranks that were forked with it."""

    def point(called: int, what: str) -> None:
        if (dist.get_rank(), called) == (rank, number):
            os.killpg(0, signal.SIGKILL) if with_others else os.kill(os.getpid(), signal.SIGKILL)

    return point


def flip_every_file(folder: Path, positions: int) -> Iterator[tuple[Path, str]]:
    """Flip one bit of every file, at some positions one after the other; each is restored on the next step. Collective.

    Yields:
        The file, and the damaged part: a tensor, "the header" or "damaged".
    """
    draw = random.Random(1)
    files = [(path, path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()]
    _barrier()
    for path, size in files:
        for at in sorted({draw.randrange(size) for _ in range(positions)}):
            place = _place_at(path, at)
            with harmed(path, lambda path, at=at: _flip(path, at)):  # type: ignore[misc]
                yield path, place


@contextmanager
def harmed(path: Path, harm: Harm) -> Iterator[None]:
    """Damage a file on the first rank, and restore it at the end of the block."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    sound = path.parent.parent / f".{path.name}.sound"
    _barrier()
    if is_first:
        shutil.copy(path, sound)
        harm(path)
    _barrier()
    yield
    _barrier()
    if is_first:
        sound.replace(path)
    _barrier()


def cut(path: Path) -> None:
    """Truncate a file by one byte."""
    path.write_bytes(path.read_bytes()[:-1])


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(content)


def _place_at(path: Path, at: int) -> str:
    if path.suffix != ".safetensors":
        return "damaged"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    if at < header:
        return "the header"
    places = json.loads(content[8:header])
    places.pop("__metadata__")
    return next(
        name
        for name, entry in places.items()
        if entry["data_offsets"][0] <= at - header < entry["data_offsets"][1]
    )


def _anonymous() -> int:
    match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def anonymous_peak(work: Callable[[], object]) -> int:
    """Return the peak of anonymous memory during an action, above its value before."""
    gc.collect()
    before, most, is_done = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.is_set():
            most = max(most, _anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    is_done.set()
    watcher.join()
    return most - before


def in_warm_process(function: Callable[..., None], *args: Any, seconds: float) -> None:
    """Call a function in a new process without threads, from which ranks can be forked.

    Raises:
        AssertionError: the call failed, or took too long.
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
    """Fork the ranks of a gloo group, in one process group of the system, and wait for them.

    Returns:
        The exit code of each: 0, 1 if it raised, or the negative number of a signal.

    Raises:
        AssertionError: ranks did not end in time, and were killed.
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
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pids[0], signal.SIGKILL)
            raise AssertionError(f"of {len(pids)} ranks {len(ends)} ended within {seconds:g} s")
        time.sleep(0.002)
    return [ends[pid] for pid in pids]


class _Raw(io.FileIO):
    """A file that calls the point in the middle of each write."""

    note: Callable[[str], None]

    def write(self, content: Any) -> int:
        half = len(content) // 2
        done = super().write(memoryview(content)[:half]) if half else 0
        self.note(f"write {self.name}")
        return done + super().write(memoryview(content)[half:])


def _open(folder: Path, note: Callable[[str], None]) -> Callable[..., Any]:
    original = builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or not _is_below(file, folder):
            return original(file, mode, *args, **kwargs)
        note(f"open {file}")
        raw = _Raw(file, mode.replace("b", "").replace("t", ""))
        raw.note = note
        return io.BufferedWriter(raw) if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), "utf-8")

    return opened


def _on_path(
    original: Callable[..., Any], name: str, folder: Path, note: Callable[[str], None]
) -> Callable[..., Any]:
    def called(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None or _is_below(path, folder):
            note(" ".join([name, str(path), *map(str, args[: name in ("rename", "replace")])]))
        return original(path, *args, **kwargs)

    return called


def _fsync(folder: Path, note: Callable[[str], None]) -> Callable[[int], None]:
    original = os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if _is_below(path, folder):
            note(f"fsync {path}")
        original(descriptor)

    return fsync


def _is_below(path: Any, folder: Path) -> bool:
    return str(os.path.abspath(os.fspath(path))).startswith(str(folder))
