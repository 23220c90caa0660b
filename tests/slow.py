"""Rows of a test's table that `make test` leaves out."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """Return the row of these values, marked as slow."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_but_for(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return rows of one value, of which those that are not quick are marked as slow."""
    return [value if value in quick else slow(value) for value in values]
