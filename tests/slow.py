"""Rows of a parametrized test that only `make test-all` runs."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Mark rows as slow; a row of several arguments is a tuple."""
    rows = tuple(row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def slow_except(quick: Container[Any], rows: Iterable[Any]) -> list[Any]:
    """Mark all rows as slow but some."""
    return [param for row in rows for param in ([row] if row in quick else slow(row))]
