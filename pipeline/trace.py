"""When a rank computed what: the measured counterpart of simulate.py."""

import time

import torch

from .action import Action
from .simulate import Span


class Trace:
    """The computations of a rank, timed while they run.

    On CUDA the device's own clock is read, by events in the current stream, and nothing waits for it until
    `spans` is asked for.

    Args:
        device: where the computations run.
    """

    def __init__(self, device: torch.device) -> None:
        self._spans: list[Span] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        self._is_cuda = device.type == "cuda"
        self._origin: torch.cuda.Event | None = None
        self._origin_seconds = 0.0
        self._start: float | torch.cuda.Event = 0.0

    def begin(self) -> None:
        """A computation starts: its inputs are here."""
        self._start = self._event() if self._is_cuda else time.perf_counter()

    def end(self, action: Action) -> None:
        """The computation that began last is done."""
        if isinstance(self._start, float):
            self._spans.append(Span(action, self._start, time.perf_counter()))
        else:
            self._events.append((action, self._start, self._event()))

    def spans(self) -> list[Span]:
        """All computations in order, in seconds of `time.perf_counter()`, which processes of a machine share."""
        if self._origin is not None:
            torch.cuda.synchronize()
            for action, start, end in self._events:
                self._spans.append(Span(action, self._seconds(start), self._seconds(end)))
            self._events.clear()
        return list(self._spans)

    def _event(self) -> torch.cuda.Event:
        if self._origin is None:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin_seconds = time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, event: torch.cuda.Event) -> float:
        assert self._origin is not None
        return self._origin_seconds + self._origin.elapsed_time(event) / 1000
