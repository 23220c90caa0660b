"""Rows of a parametrized test that only `make test-all` runs."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_row(*values: Any, id: str | None = None) -> Any:
    """Return the row of these values, marked as slow."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow(*rows: Any) -> list[Any]:
    """Mark rows as slow; a row of several arguments is a tuple."""
    return [slow_row(*(row if isinstance(row, tuple) else (row,))) for row in rows]


def slow_except(quick: Container[Any], rows: Iterable[Any]) -> list[Any]:
    """Mark all rows as slow but some."""
    return [param for row in rows for param in ([row] if row in quick else slow(row))]
