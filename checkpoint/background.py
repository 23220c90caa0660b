"""Run saves, synchronous or in a thread, one at a time; copies of the tensors that an asynchronous save writes."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.device import host_memory, wait_for_stream
from ..cluster.failures import failure_behind, naming_failures
from ..cluster.gathering import AgreedError
from ..cluster.placement import round_up

_CHUNK = 2**20  # bytes shared by several small tensors; a larger one has a chunk of its own
_ALIGNMENT = 64

_SHARED = (OSError, ValueError, AgreedError)  # errors of a save that all ranks raise

Keep = Callable[[Tensor], Tensor]  # returns the memory to save for a tensor: itself, or a copy

_logger = logging.getLogger(__name__)


class Copies:
    """CPU memory for copies of tensors, reused from save to save; pinned if the tensors are on a GPU.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._index, self._used = 0, 0  # of the current chunk; the bytes of it that are taken

    @contextmanager
    def keeping(self) -> Iterator[Keep]:
        """Yield `copy`. Copies overwrite those of the previous save and are complete at the end of the block."""
        self._index, self._used = 0, 0
        yield self.copy
        wait_for_stream(self._device)

    def copy(self, tensor: Tensor) -> Tensor:
        """Start a contiguous copy to the CPU."""
        tensor = tensor.detach()
        memory = self._take(tensor.numel() * tensor.dtype.itemsize)
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _take(self, nbytes: int) -> Tensor:
        """Return unused bytes of the current chunk or the next; a chunk that is missing or too small is allocated."""
        if self._used and self._used + nbytes > self._chunks[self._index].nbytes:
            self._index, self._used = self._index + 1, 0
        is_missing = self._index == len(self._chunks)
        if is_missing or self._chunks[self._index].nbytes < nbytes:
            # Appends a chunk, or replaces one that an earlier save made for smaller tensors.
            self._chunks[self._index : self._index + 1] = [host_memory(max(nbytes, _CHUNK), self._device)]
        start = self._used
        self._used += round_up(nbytes, _ALIGNMENT)
        return self._chunks[self._index][start : start + nbytes]


class _SaveThread(threading.Thread):
    """The thread of an asynchronous save.

    Args:
        work: writes the save.
        path: the file or folder that is written.
    """

    def __init__(self, work: Callable[[], None], path: Path) -> None:
        super().__init__(target=work, name=f"save {path.name}")
        self.path = Path(os.path.realpath(path))


def wait_for_saves(path: Path) -> None:
    """Wait for asynchronous saves of this process to `path`, or to a folder in or above it; raise none of their errors.

    Boosters with different plugins share nothing but the process, whose list of live threads has the saves of all.
    """
    place = Path(os.path.realpath(path))
    for thread in threading.enumerate():
        if isinstance(thread, _SaveThread) and (
            place.is_relative_to(thread.path) or thread.path.is_relative_to(place)
        ):
            thread.join()


class Save:
    """Handle of a save.

    Attributes:
        path: the file or folder that is written.
        failure: the error if the save failed, None before its end or if it succeeded. The same on every rank, except
            that a `RankFailure` is raised on the ranks that waited for the failed one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """True once the save has ended on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the save.

        Raises:
            OSError, ValueError, AgreedError: the save failed; nothing appeared under its name.
            RankFailure: another rank failed, died or left during the save; chained to the backend's error.
        """
        with naming_failures("Save.wait", (), raised_alike=_SHARED):
            self._join()
            if self.failure is not None:
                raise self.failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _fail(self, error: Exception) -> None:
        """Keep the error for `wait`, with the rank that failed if a connection broke, and log it.

        The first rank logs an error that all have; of another rank's failure every rank logs where it waited.
        """
        if (failure := failure_behind(error, f"the save to {self.path}")) is not None:
            failure.__cause__, error = error, failure
        self.failure = error
        if failure is not None or not dist.is_initialized() or dist.get_rank() == 0:
            _logger.error(
                "saving to %s failed: %s. Earlier complete checkpoints are unaffected", self.path, error
            )


class Saver:
    """Runner of a plugin's saves: one at a time, since they communicate over one group.

    All ranks make the same saves in the same order. See `wait_for_saves` for those of other plugins.
    """

    def __init__(self) -> None:
        self._last: Save | None = None

    def settle(self) -> None:
        """Wait for the end of the last save; its error is not raised here."""
        if self._last is not None:
            self._last._join()

    def run(
        self, work: Callable[[], None], path: Path, *, use_async: bool = False, is_reporting: bool = False
    ) -> Save:
        """Run a save now, or in a thread.

        Args:
            work: writes the save; collective.
            path: the file or folder that is written.
            use_async: run it in a thread.
            is_reporting: do not raise errors that all ranks share. As with a thread, the first rank logs the error,
                `Save.failure` keeps it, and training continues.
        """
        self.settle()
        save = self._last = Save(path)

        def run_work(*, reported: tuple[type[Exception], ...]) -> None:
            try:
                work()
            except reported as error:
                save._fail(error)

        if use_async:
            save._thread = _SaveThread(partial(run_work, reported=(Exception,)), path)
            save._thread.start()
        else:
            run_work(reported=_SHARED if is_reporting else ())
        return save
