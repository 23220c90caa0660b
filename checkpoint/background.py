"""Saves at once or beside training, one after the other, and the memory of copies that such a save writes from."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .consent import CheckpointError

_CHUNK = 2**26  # a power of two: torch rounds pinned memory up to one
_ALIGNMENT = 64

_logger = logging.getLogger(__name__)


class Copies:
    """Memory for copies on the CPU, kept from one save to the next; pinned where tensors come from a GPU.

    Args:
        device: of the tensors that are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._chunk, self._used = 0, 0

    def forget(self) -> None:
        """Let the next copies overwrite the previous ones."""
        self._chunk, self._used = 0, 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the CPU. From a GPU it is there after `finish`."""
        tensor = tensor.detach()
        memory = self._take(tensor.numel() * tensor.dtype.itemsize)
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, nbytes: int) -> Tensor:
        while self._chunk < len(self._chunks) and self._used + nbytes > self._chunks[self._chunk].nbytes:
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            is_pinned = self._device.type == "cuda"
            size = max(nbytes, _CHUNK)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned))
        start = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunks[self._chunk][start : start + nbytes]


class Save:
    """A save that was begun.

    Attributes:
        path: what is written.
        failure: why it failed, None while it goes on and where it did not; the same on every rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """True once it has ended, on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Let it end.

        Raises:
            OSError, ValueError, RuntimeError: it failed; nothing appeared under its name.
        """
        self._join()
        if self.failure is not None:
            raise self.failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        if not dist.is_initialized() or dist.get_rank() == 0:
            _logger.error("saving to %s failed: %s. What was complete before stands", self.path, error)


class Saver:
    """The saves of a plugin, which communicate over one group: each begins when the one before has ended.

    Every rank asks for the same saves in the same order.
    """

    def __init__(self) -> None:
        self._last: Save | None = None

    def settle(self) -> None:
        """Let the last save end, however it does."""
        if self._last is not None:
            self._last._join()

    def run(self, work: Callable[[], None], path: Path) -> Save:
        """Do it now.

        Raises:
            Exception: what it raises.
        """
        save = self._next(path)
        work()
        return save

    def run_reporting(self, work: Callable[[], None], path: Path) -> Save:
        """Do it now; the first rank logs why it could not be written, and the save keeps that."""
        save = self._next(path)
        try:
            work()
        except (OSError, ValueError, CheckpointError) as error:  # on every rank alike; training goes on
            save._fail(error)
        return save

    def begin(self, work: Callable[[], None], path: Path) -> Save:
        """Do it in a thread; the first rank logs what goes wrong, and the save keeps that."""
        save = self._next(path)

        def run() -> None:
            try:
                work()
            except Exception as error:  # training goes on, and the user finds it in the save
                save._fail(error)

        save._thread = threading.Thread(target=run, name=f"save {path.name}")
        save._thread.start()
        return save

    def _next(self, path: Path) -> Save:
        self.settle()
        self._last = Save(path)
        return self._last
