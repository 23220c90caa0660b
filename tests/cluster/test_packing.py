"""Groups of limited size."""

import pytest

from echelon.cluster.packing import packed


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([1, 2, 9, 1, 1], [[1, 2], [9], [1, 1]]),
        ([9, 0, 3, 0, 1], [[9], [0, 3, 0], [1]]),
        ([], []),
    ],
)
def test_groups_are_filled_in_order_and_a_large_item_is_alone(
    sizes: list[int], groups: list[list[int]]
) -> None:
    assert packed(sizes, 3, int) == groups
