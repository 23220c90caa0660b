"""Distances of tensors: every bit, numbers that are none, other formats, and chunks."""

from math import inf, nan

import pytest
import torch

from echelon.checkpoint.box import Box
from echelon.checkpoint.difference import Distance, chunks_of, distance_between


def test_equal_tensors_are_at_no_distance_whatever_they_hold() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.tensor([0.0, -0.0, 1.5, nan, inf, -inf], dtype=dtype)
        found = distance_between(tensor, tensor.clone())
        assert (found.absolute, found.relative, found.differing, found.entries) == (0.0, 0.0, 0, 6)
        assert not found.exceeds(0.0)
    for dtype in (torch.int64, torch.uint8, torch.bool):
        assert distance_between(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)).differing == 0


def test_the_largest_differences_and_the_differing_entries_are_found() -> None:
    a, b = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[1.0, 2.5], [3.0, 0.0]])
    found = distance_between(a, b)
    assert found == Distance(absolute=1.0, relative=0.25, magnitude=4.0, differing=2, entries=4)
    assert found.exceeds(0.2) and not found.exceeds(0.25)


def test_a_single_bit_counts() -> None:
    a = torch.tensor([1.0, 0.0], dtype=torch.bfloat16)
    found = distance_between(a, torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    assert (found.absolute, found.differing) == (0.0, 1)
    assert found.exceeds(0.0) and not found.exceeds(1e-9)
    large = torch.tensor([2**60])
    assert distance_between(large, large + 1).differing == 1  # the same in float64


@pytest.mark.parametrize(
    ("left", "right"), [(nan, 1.0), (1.0, nan), (inf, 1.0), (inf, -inf), (nan, inf), (0.0, inf)]
)
def test_no_tolerance_lets_a_number_and_none_be_equal(left: float, right: float) -> None:
    found = distance_between(torch.tensor([left, 1.0]), torch.tensor([right, 1.0]))
    assert (found.absolute, found.relative, found.differing) == (inf, inf, 1)
    assert found.magnitude == 1.0 and found.exceeds(1e6)


def test_other_formats_are_compared_by_their_numbers() -> None:
    a = torch.tensor([1.0, 1.0 + 2**-10])
    found = distance_between(a, a.bfloat16())
    assert (found.absolute, found.differing) == (2**-10, 1)


def test_chunks_are_a_tensor_in_order() -> None:
    tensor = torch.arange(3 * 5 * 7).view(3, 5, 7)
    boxes = list(chunks_of(tensor.shape, 16))
    assert max(box.numel for box in boxes) <= 16
    joined = torch.cat([tensor[box.within(Box.whole(tensor.shape))].reshape(-1) for box in boxes])
    assert torch.equal(joined, torch.arange(105))
    assert list(chunks_of((), 16)) == [Box((), ())] and list(chunks_of((0, 3), 16)) == []


def test_chunks_join_to_the_distance_of_the_whole() -> None:
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    b[0] = a[0]
    joined = Distance()
    for box in chunks_of(a.shape, 4):
        part = box.within(Box.whole(a.shape))
        joined = joined.joined(distance_between(a[part], b[part]))
    assert joined == distance_between(a, b)
