"""Covering arrays: few rows of settings in which every two settings of different factors occur together."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Row], bool], *, strength: int = 2
) -> list[Row]:
    """Return rows in which all values of any `strength` factors occur together, if a valid row has them.

    Greedy: each row is the one with most combinations that no previous row has; of several, the one whose values
    occurred least, then the first.

    Args:
        factors: the values of each factor, by name.
        returns True for a valid row. Combinations of no valid row are left out.
        strength: 2 covers pairs, 1 single values.
    """
    every = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    candidates = [row for row in every if is_valid(row)]
    bits: dict[object, int] = {}
    masks = [_mask(combinations(row.items(), strength), bits) for row in candidates]
    open_bits = (1 << len(bits)) - 1
    rows: list[Row] = []
    met: Counter[tuple[str, Any]] = Counter()
    while open_bits:
        gains = [(mask & open_bits).bit_count() for mask in masks]
        most = max(gains)
        ties = [at for at, gain in enumerate(gains) if gain == most]
        best = min(ties, key=lambda at: sum(met[choice] for choice in candidates[at].items()))
        rows.append(candidates[best])
        met.update(candidates[best].items())
        open_bits &= ~masks[best]
    return rows


def _mask(combinations: Iterable[object], bits: dict[object, int]) -> int:
    """Return the bits of combinations, numbered in order of appearance."""
    mask = 0
    for combination in combinations:
        mask |= 1 << bits.setdefault(combination, len(bits))
    return mask
