"""What is wrong with settings that are on or off."""

from collections.abc import Mapping
from typing import Any


def switch_faults(given: Mapping[str, Any]) -> list[str]:
    """Which of these are neither True nor False."""
    return [
        f"{name}={value!r} must be True or False"
        for name, value in given.items()
        if not isinstance(value, bool)
    ]
