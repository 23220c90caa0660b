"""Boxes cover a tensor once, or it is told where not."""

import pytest

from echelon.checkpoint.box import Box, flat_boxes
from echelon.checkpoint.coverage import coverage_faults

from .handmade import columns, flat_slices


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (3, 4, 5), (0, 3), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cut", [flat_slices, columns])
def test_what_layouts_cut_covers_the_whole(shape: tuple[int, ...], ranks: int, cut) -> None:
    boxes = [box for mine in cut(shape, ranks) for box in mine]
    assert coverage_faults(shape, boxes) == []


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 5)])
def test_any_box_that_is_missing_or_there_twice_is_told(shape: tuple[int, ...]) -> None:
    boxes = [box for mine in flat_slices(shape, 3) for box in mine]
    for index, box in enumerate(boxes):
        (fault,) = coverage_faults(shape, boxes[:index] + boxes[index + 1 :])
        assert fault.startswith(f"{box.numel} of its ")
        (fault,) = coverage_faults(shape, [*boxes, box])
        assert fault.endswith("overlap")


def test_a_box_that_overlaps_while_as_much_is_missing_is_told() -> None:
    assert coverage_faults((4, 4), [Box((0, 0), (4, 2)), Box((0, 1), (4, 2))]) == [
        "[0:4, 0:2] and [0:4, 1:3] overlap"
    ]
    assert coverage_faults((), []) == ["1 of its 1 entries are nowhere"]
    assert coverage_faults((), [Box((), ()), Box((), ())]) == ["[] and [] overlap"]


def test_a_box_that_reaches_out_is_told() -> None:
    boxes = list(flat_boxes(0, 8, (2, 4)))
    assert coverage_faults((2, 3), boxes) == ["[0:2, 0:4] reaches out of it"]
