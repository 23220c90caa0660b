"""Lines that a logger writes during a test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(logger: str = "echelon", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect the lines that are logged within the block; a level replaces the logger's."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(logger)
    level_before = log.level
    log.addHandler(handler)
    log.setLevel(level or level_before)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level_before)
