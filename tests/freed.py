"""Wait until objects are freed."""

import time
from collections.abc import Mapping
from weakref import ReferenceType


def still_alive(references: Mapping[str, ReferenceType], *, seconds: float = 1.0) -> set[str]:
    """Return the names of objects that are not freed within some seconds.

    While the watch of another thread reads a stack (cluster/whereabouts.py), for milliseconds, it holds the frames,
    and with them all that their functions held.
    """
    deadline = time.monotonic() + seconds
    while alive := {name for name, reference in references.items() if reference() is not None}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return alive
