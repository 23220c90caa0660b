"""Boxes of a whole tensor, and where a rank's pieces lie in it. Which memory holds them is held.py.

[Note: boxes] What a rank holds of a tensor is a flat stretch, in row-major order, of its piece of it: all of the piece,
or what ZeRO left of it. The piece is cut out of the whole along one dimension, perhaps in several stretches, for fused
projections, and perhaps longer than it, by padding. So it takes a few boxes: a flat stretch of a tensor of n
dimensions is at most 2n − 1 of them, and each is cut where the stretches of the piece end.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..cluster.placement import Placement, Shard, Stretch


class Box(NamedTuple):
    """A rectangle of a whole tensor: where it begins, and its lengths, along each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return Box(offset=(0,) * len(shape), size=tuple(shape))

    @property
    def numel(self) -> int:
        """How many entries it has."""
        return prod(self.size)

    def common(self, other: "Box") -> "Box | None":
        """What both have in common; None where that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.ends(), other.ends()))
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of a tensor that covers `outer` which cover this box; it lies in `outer`."""
        return tuple(
            slice(start - first, start - first + length)
            for start, first, length in zip(self.offset, outer.offset, self.size, strict=True)
        )

    def ends(self) -> tuple[int, ...]:
        """Where it ends, along each dimension."""
        return tuple(start + length for start, length in zip(self.offset, self.size, strict=True))


class Cut(NamedTuple):
    """A box of the whole tensor, and the same entries as a box of a rank's piece."""

    whole: Box
    piece: Box


def whole_shape(piece_shape: Sequence[int], placement: Placement | None) -> tuple[int, ...]:
    """The shape of a whole tensor without padding, from that of a rank's piece."""
    shape = list(piece_shape)
    if isinstance(placement, Shard):
        shape[placement.dim] = sum(placement.blocks)
    return tuple(shape)


def cuts_of(box: Box, placement: Placement | None, rank: int) -> Iterator[Cut]:
    """The parts of a box of a rank's piece that are no padding, with where they lie in the whole tensor.

    Args:
        box: in the piece.
        placement: how the whole is cut.
        rank: of the axis that it is cut over.
    """
    if not isinstance(placement, Shard):
        if box.numel:
            yield Cut(whole=box, piece=box)
        return
    for stretch in placement.stretches_of(rank):
        cut = _along(box, placement.dim, stretch)
        if cut is not None:
            yield cut


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that entries `start` to `stop` of a tensor make up in row-major order, in that order.

    Each lies end to end in memory, where the tensor does.
    """
    if not shape:
        if start < stop:
            yield Box((), ())
        return
    row = prod(shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            count = (stop - start) // row
            yield Box((first, *(0 for _ in shape[1:])), (count, *shape[1:]))
            start += count * row
        else:
            end = min(stop, (first + 1) * row)
            for box in flat_boxes(inside, end - first * row, shape[1:]):
                yield Box((first, *box.offset), (1, *box.size))
            start = end


def _along(box: Box, dim: int, stretch: Stretch) -> Cut | None:
    begin = max(box.offset[dim], stretch.piece)
    end = min(box.offset[dim] + box.size[dim], stretch.piece + stretch.length)
    if begin >= end or not box.numel:
        return None
    return Cut(
        whole=Box(
            _with(box.offset, dim, stretch.whole + begin - stretch.piece), _with(box.size, dim, end - begin)
        ),
        piece=Box(_with(box.offset, dim, begin), _with(box.size, dim, end - begin)),
    )


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])
