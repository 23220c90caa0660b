"""Pack items, in order, into consecutive groups of a limited size: buckets of parameters, files of tensors."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def packed(items: Iterable[Item], limit: float, size: Callable[[Item], int]) -> list[list[Item]]:
    """Return the items in groups whose sizes add up to at most `limit`; a larger item is alone in its group.

    Args:
        items: kept in this order.
        limit: the sum of sizes that no group of several items exceeds.
        size: returns the size of an item.
    """
    groups: list[list[Item]] = []
    filled = 0
    for item in items:
        if not groups or filled + size(item) > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size(item)
    return groups
