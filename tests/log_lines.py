"""Lines that a logger writes during a test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    """Handler that keeps the messages of its records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged(logger: str = "echelon", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect the lines that are logged within the block; a level replaces the logger's."""
    handler = _Lines()
    log = logging.getLogger(logger)
    level_before = log.level
    log.addHandler(handler)
    log.setLevel(level or level_before)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level_before)
