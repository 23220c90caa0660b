"""Saves at once or beside training, one after the other, and the memory of copies that such a save writes from."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.agree import AgreedError
from ..cluster.device import host_memory, wait_for_stream

_CHUNK = 2**20  # of several small tensors; a larger one has a chunk of its own
_ALIGNMENT = 64

Keep = Callable[[Tensor], Tensor]  # gives the memory that a save writes from, in the place of a tensor's own

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

    @contextmanager
    def keeping(self) -> Iterator[Keep]:
        """Make copies, which are there at the end of the block, in the memory of the previous ones."""
        self._chunk, self._used = 0, 0
        yield self.copy
        wait_for_stream(self._device)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the CPU."""
        tensor = tensor.detach()
        memory = self._take(tensor.numel() * tensor.dtype.itemsize)
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _take(self, nbytes: int) -> Tensor:
        if self._used and self._used + nbytes > self._chunks[self._chunk].nbytes:
            self._chunk, self._used = self._chunk + 1, 0
        here = slice(self._chunk, self._chunk + 1)
        if not any(nbytes <= chunk.nbytes for chunk in self._chunks[here]):  # none yet, or of smaller copies
            self._chunks[here] = [host_memory(max(nbytes, _CHUNK), self._device)]
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

    def run(
        self, work: Callable[[], None], path: Path, *, use_async: bool = False, is_reporting: bool = False
    ) -> Save:
        """Do it now, or in a thread.

        Args:
            work: writes the save; collective.
            path: what is written.
            use_async: do it in a thread.
            is_reporting: raise nothing that all ranks failed by; as with a thread, the first rank logs why it could not
                be written, the save keeps that, and training goes on.
        """
        self.settle()
        save = self._last = Save(path)
        kinds: tuple[type[Exception], ...] = (OSError, ValueError, AgreedError) if is_reporting else ()

        def run(kinds: tuple[type[Exception], ...]) -> None:
            try:
                work()
            except kinds as error:
                save._fail(error)

        if use_async:
            save._thread = threading.Thread(target=run, args=[(Exception,)], name=f"save {path.name}")
            save._thread.start()
        else:
            run(kinds)
        return save
