"""Collectives over gloo in either of their ways."""

from collections.abc import Callable
from math import inf
from typing import Any
from unittest.mock import patch

import pytest

from echelon.cluster import gloo

SLICES = pytest.mark.parametrize("slices", [True, False], ids=["slices", "plain"])


def with_slices(slices: bool, function: Callable, *args: Any) -> Any:
    """Call a function on a rank whose collectives go by slices, or else as over NCCL by torch's own."""
    with patch.object(gloo, "MIN_BYTES", 0 if slices else inf):
        return function(*args)
