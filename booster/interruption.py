"""Ctrl-C and SIGTERM at the end of a step, so that a run which a scheduler ends is saved before."""

import signal
from types import FrameType, TracebackType
from typing import Any

from ..cluster.gathering import gather_integers


class Interruption:
    """A block in which SIGINT and SIGTERM end no process: the script asks for them between two steps.

        with Interruption() as interruption:
            for step in range(first, last):
                ...
                if interruption.requested():
                    booster.save_checkpoint("checkpoints", step, ...)
                    break

    Repeated signals do not end a process either: a scheduler may signal all of them, and torchrun then its workers.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._number = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        self._handlers = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def requested(self) -> int:
        """Return the number of a signal that any rank received, 0 if none did. Gathers an integer over the world."""
        return max(number for (number,) in gather_integers((self._number,), call="interruption.requested"))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = number
