"""Every call by which this process changes files below a folder, counted, so that one of them can be its last."""

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

Point = Callable[[int, str], None]
_ON_PATHS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir")


@contextmanager
def write_points(folder: Path, point: Point) -> Iterator[list[str]]:
    """Within it, `point` is called before each call that changes files, and in the middle of each write.

    Args:
        folder: calls about files elsewhere are left alone.
        point: gets the number of the call, from 1, and what it does. It may raise what the call then raises.

    Returns:
        What was called, in its order.
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


def full_disk(number: int) -> Point:
    """From this call on nothing can be made or written."""

    def point(called: int, what: str) -> None:
        if called >= number and what.split()[0] in ("open", "write", "fsync", "mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what.split()[-1])

    return point


class _Raw(io.FileIO):
    """Is interrupted in the middle of each write."""

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
