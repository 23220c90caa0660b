"""Rows of a parametrized test that only `make test-all` runs."""

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Mark rows as slow; a row of several arguments is a tuple."""
    rows = tuple(row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
