"""ColossalAI's logger, on Python's: messages of chosen ranks."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist


class DistributedLogger:
    """Logs on the ranks that `ranks=[...]` of a call names; without it on all of them.

    Args:
        logger: Python's.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log a message of level DEBUG."""
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log a message of level INFO."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log a message of level WARNING."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log a message of level ERROR."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if ranks is None or rank in ranks:
            self.logger.log(level, message, stacklevel=3)

    def set_level(self, level: str) -> None:
        """Set the smallest level that is logged, by its name."""
        self.logger.setLevel(level)

    def log_to_file(self, path: str, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Write messages to `path/rank_{rank}.log` too."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        Path(path).mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank}{'' if suffix is None else f'_{suffix}'}.log"
        handler = logging.FileHandler(Path(path) / name, mode)
        handler.setLevel(level)
        self.logger.addHandler(handler)


def get_dist_logger(name: str = "echelon.script") -> DistributedLogger:
    """Return the logger of this name; its level is INFO."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    return DistributedLogger(logger)


def disable_existing_loggers(
    include: Sequence[str] | None = None, exclude: Sequence[str] = ("echelon", "echelon.script")
) -> None:
    """Set loggers to WARNING: those of `include`, or else all, but never those of `exclude`."""
    names = include if include is not None else [*logging.root.manager.loggerDict]
    for name in names:
        if name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
