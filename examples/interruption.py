"""Ctrl-C and SIGTERM, which a training loop learns of between two steps. What it does then is training.py's."""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Interrupted(Exception):
    """The run was interrupted, on every rank, and the first one has reported what is left of it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class Interruption:
    """From `begin` to `end` both signals are noted, and end nothing.

    Also not when they come again: a scheduler may send them to all processes, and torchrun to its own once more.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Note signals from now on."""
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def end(self) -> None:
        """Let them do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> int:
        """The number of the signal that some rank was sent, 0 where none was. All-reduce over the world."""
        number = torch.tensor(self._number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = number
