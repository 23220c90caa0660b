"""Saves that run at once or beside training, one after the other. What they write is their caller's."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from .consent import CheckpointError

_logger = logging.getLogger(__name__)


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
        """Whether it has ended, on this rank."""
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


class Saver:
    """Runs the saves of a plugin, which communicate over one group: each begins when the one before has ended.

    Every rank asks for the same ones in the same order.
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
        self.settle()
        save = self._last = Save(path)
        work()
        return save

    def run_and_tell(self, work: Callable[[], None], path: Path) -> Save:
        """Do it now; why it could not be written is reported by the first rank, and kept in the save."""
        self.settle()
        save = self._last = Save(path)
        try:
            work()
        except (OSError, ValueError, CheckpointError) as error:  # on every rank alike; training goes on
            _take(save, error)
        return save

    def begin(self, work: Callable[[], None], path: Path) -> Save:
        """Do it in a thread; whatever goes wrong is told by the first rank, and kept in the save."""
        self.settle()
        save = self._last = Save(path)

        def run() -> None:
            try:
                work()
            except Exception as error:  # training goes on, and the user finds it in the save
                _take(save, error)

        save._thread = threading.Thread(target=run, name=f"save {path.name}")
        save._thread.start()
        return save


def _take(save: Save, error: Exception) -> None:
    save.failure = error
    if not dist.is_initialized() or dist.get_rank() == 0:
        _logger.error("saving to %s failed: %s. What was complete before stands", save.path, error)
