"""Faults in what plugins do around a step, noticed by scripts of the public calls."""

from typing import Any

from ..mutations import Mutation
from ..test_features import SCRIPTS


def nothing_noted(optimizer: Any, factor: float) -> None:
    return None


def always_first(self: Any) -> tuple[int, int]:
    """Every replica trains on the first one's samples."""
    return 0, 2


FAULTS = {
    "a loss over the global batch is not corrected": Mutation(
        target="echelon.plugins.engine:_note_factor",
        replacement=nothing_noted,
        check=SCRIPTS["a loss exact over the global batch"].departure,
    ),
    "every replica trains on the first one's samples": Mutation(
        target="echelon.plugins.base:Plugin.data_rank",
        replacement=property(always_first),
        check=SCRIPTS["LowLevelZeroPlugin"].departure,
    ),
}
