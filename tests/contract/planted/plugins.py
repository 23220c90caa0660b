"""Faults in what plugins do around a step, noticed by scripts of the public calls."""

from typing import Any

from ..mutations import fault, returning
from ..test_features import SCRIPTS


def always_first(self: Any) -> tuple[int, int]:
    """Every replica trains on the first one's samples."""
    return 0, 2


FAULTS = {
    "a loss over the global batch is not corrected": fault(
        "plugins.engine:_note_factor",
        returning(None),
        check=SCRIPTS["a loss exact over the global batch"].departure,
    ),
    "every replica trains on the first one's samples": fault(
        "plugins.base:Plugin.data_rank", property(always_first), check=SCRIPTS["LowLevelZeroPlugin"].departure
    ),
}
