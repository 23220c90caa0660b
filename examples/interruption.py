"""Deferred handling of Ctrl-C and SIGTERM: ranks agree on a signal between two training steps."""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Interrupted(Exception):
    """A signal interrupted the run on every rank, and the first rank has reported it.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class Interruption:
    """Record SIGINT and SIGTERM between `begin` and `end` without ending the process.

    Repeated signals do not end it either: a scheduler may signal all processes, and torchrun then signals its workers.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Install the handlers that record signals."""
        self._before = {number: signal.signal(number, self._record) for number in self.SIGNALS}

    def end(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> int:
        """Return the number of a signal that any rank received, 0 if none did. All-reduce over the world."""
        number = torch.tensor(self._number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._number = number
