"""The covering array has every combination of factors that occurs in a valid row."""

from itertools import combinations

import pytest

from .covering import Row, covering

FACTORS = {"a": (0, 1, 2), "b": ("x", "y"), "c": (False, True), "d": (1, 2, 4)}


def without_two(row: Row) -> bool:
    """Exclude a pair of values, and a combination of three."""
    return not (row["a"] == 2 and row["c"]) and not (row["b"] == "y" and row["c"] and row["d"] == 4)


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_valid_combination_is_covered(strength: int) -> None:
    rows = covering(FACTORS, without_two, strength=strength)
    every = covering(FACTORS, without_two, strength=len(FACTORS))
    assert all(map(without_two, rows))
    assert _met(rows, strength) == _met(every, strength)
    assert len(every) == 36 - 6 - 2
    assert len(rows) <= {1: 3, 2: 12, 3: 24}[strength]


def _met(rows: list[Row], strength: int) -> set[object]:
    return {combination for row in rows for combination in combinations(row.items(), strength)}
