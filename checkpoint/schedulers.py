"""Whether what was saved of a learning-rate scheduler is of this kind of scheduler. Files are others' affair."""

from collections.abc import Mapping
from typing import Any


def scheduler_faults(lr_scheduler: Any, state: Any, what: str) -> list[str]:
    """Why a scheduler cannot go on from a state, at most one reason; torch's would take any.

    Args:
        lr_scheduler: with `state_dict`.
        state: what is stored.
        what: to be named.
    """
    own = lr_scheduler.state_dict()
    if not isinstance(own, Mapping):  # of one's own: it knows best
        return []
    there = set(state) if isinstance(state, Mapping) else set()
    # Names with an underscore are torch's inner ones, which come and go with its releases.
    missing = [str(name) for name in own if name not in there and not str(name).startswith("_")]
    if isinstance(state, Mapping) and not missing:
        return []
    kind = type(lr_scheduler).__name__
    return [f"{what} is no state of a {kind}: it lacks {', '.join(missing)}"]
