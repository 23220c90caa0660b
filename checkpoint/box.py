"""Boxes of a whole tensor, where a rank's shards lie in it, and tensors on disk that are read by boxes.

[Note: boxes] A rank holds a flat stretch, in row-major order, of its shard of a tensor: all of the shard, or the
piece that ZeRO leaves of it. The shard is cut out of the whole along one dimension, perhaps in several stretches, for
fused projections, and perhaps longer than it, by padding. So it takes a few boxes: a flat stretch of a tensor of n
dimensions is at most 2n − 1 of them, and each is cut where the stretches of the shard end.
"""

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..cluster.placement import Placement, Shard


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
        """The number of entries."""
        return prod(self.size)

    def common(self, other: "Box") -> "Box | None":
        """The intersection with another box; None where it is empty."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.ends(), other.ends()))
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that covers `outer`."""
        return tuple(
            slice(start - first, start - first + length)
            for start, first, length in zip(self.offset, outer.offset, self.size, strict=True)
        )

    def ends(self) -> tuple[int, ...]:
        """The end along each dimension."""
        return tuple(start + length for start, length in zip(self.offset, self.size, strict=True))

    def along(self, dim: int, start: int, length: int) -> "Box":
        """The same box with another stretch along a dimension."""
        offset, size = list(self.offset), list(self.size)
        offset[dim], size[dim] = start, length
        return Box(tuple(offset), tuple(size))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offset, self.ends(), strict=True))}]"


class Stored(Protocol):
    """Tensors on disk, by name. Reading takes no more memory than is asked for, and communicates nothing."""

    @property
    def names(self) -> Collection[str]:
        """All tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """The stored format."""

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU, in the stored format. Read and drop it: it may be pages of the file."""


class Cut(NamedTuple):
    """A box of the whole tensor, and the same entries as a box of a rank's shard."""

    whole: Box
    shard: Box


def whole_shape(shard_shape: Sequence[int], placement: Placement | None) -> tuple[int, ...]:
    """The shape of a whole tensor without padding, from that of a rank's shard."""
    shape = list(shard_shape)
    if isinstance(placement, Shard):
        shape[placement.dim] = sum(placement.blocks)
    return tuple(shape)


def cuts_of(box: Box, placement: Placement | None, rank: int) -> Iterator[Cut]:
    """Yield the parts of a box of a rank's shard that are no padding, with their place in the whole tensor.

    Args:
        box: in the shard.
        placement: how the whole is cut.
        rank: of the axis that it is cut over.
    """
    if not isinstance(placement, Shard):
        if box.numel:
            yield Cut(whole=box, shard=box)
        return
    dim = placement.dim
    first, last = box.offset[dim], box.ends()[dim]
    for interval in placement.intervals_of(rank):
        begin, end = max(first, interval.shard), min(last, interval.shard + interval.length)
        if begin < end and box.numel:
            whole = box.along(dim, interval.whole + begin - interval.shard, end - begin)
            yield Cut(whole=whole, shard=box.along(dim, begin, end - begin))


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that entries `start` to `stop` of a tensor make up, in row-major order.

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


def coverage_errors(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Errors of boxes that do not cover every entry of a tensor of this shape exactly once."""
    whole = Box.whole(shape)
    errors = [f"{box} reaches out of it" for box in boxes if box.numel and box.common(whole) != box]
    errors += [f"{a} and {b} overlap" for a, b in _overlaps(boxes)]
    covered = sum(box.numel for box in boxes)
    if not errors and covered != whole.numel:
        errors.append(f"{whole.numel - covered} of its {whole.numel} entries are nowhere")
    return errors


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that intersect; each box meets only those that end behind its begin along the first dimension."""
    open_boxes: list[Box] = []
    for box in sorted(box for box in boxes if box.numel):
        begin = box.offset[:1]
        open_boxes = [other for other in open_boxes if not begin or other.ends()[:1] > begin]
        yield from ((other, box) for other in open_boxes if other.common(box) is not None)
        open_boxes.append(box)
