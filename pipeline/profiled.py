"""Computations of a rank, measured by torch's profiler: the actions of the schedule without their waits."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from .action import Action
from .simulate import Span
from .transport import WAIT

_MICROSECONDS = 1e6  # per second


def chrome_trace(profiler: profile) -> dict[str, Any]:
    """Return a profile in the format of Chrome's traces."""
    with TemporaryDirectory(prefix="echelon-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text())
    return trace


def computations(trace: dict[str, Any]) -> list[Span]:
    """Return the computations of a rank in order, in seconds of the machine's clock: of the host, not of a GPU.

    A computation begins when its inputs have arrived.

    Args:
        trace: of `chrome_trace`.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    waits = [event for event in events if event["name"].startswith(WAIT)]
    spans = []
    for event in events:
        action = Action.of_label(event["name"])
        if action is None:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        arrivals = [wait["ts"] + wait["dur"] for wait in waits if start <= wait["ts"] < end]
        spans.append(Span(action, *(base + time / _MICROSECONDS for time in (max([start, *arrivals]), end))))
    return sorted(spans, key=lambda span: span.start)
