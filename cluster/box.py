"""Boxes (hyperrectangles) of global tensors: the position of a rank's shards, and reads from stored tensors.

[Note: boxes] A rank has a flat interval, in row-major order, of its shard of a tensor: the full shard, or the piece
that ZeRO assigns to the rank. The shard is cut from the global tensor along one dimension for every axis that shards
it. Fused projections are cut in several intervals, and padding makes a shard longer than its part of the global tensor.
A flat interval of a tensor of n dimensions is at most 2n − 1 boxes. Each box is split further at the ends of the
shard's intervals.
"""

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .placement import PlacedShard


class Box(NamedTuple):
    """A hyperrectangle of a global tensor: its offset and its size along each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def full(shape: Sequence[int]) -> "Box":
        """Return the box that covers a full tensor."""
        return Box(offset=(0,) * len(shape), size=tuple(shape))

    @property
    def numel(self) -> int:
        """The number of entries."""
        return prod(self.size)

    def common(self, other: "Box") -> "Box | None":
        """Return the intersection with another box; None if it is empty."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.ends(), other.ends()))
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that covers `outer`."""
        return tuple(
            slice(start - first, start - first + length)
            for start, first, length in zip(self.offset, outer.offset, self.size, strict=True)
        )

    def ends(self) -> tuple[int, ...]:
        """Return the (exclusive) end along each dimension."""
        return tuple(start + length for start, length in zip(self.offset, self.size, strict=True))

    def along(self, dim: int, start: int, length: int) -> "Box":
        """Return this box with another interval along one dimension."""
        offset, size = list(self.offset), list(self.size)
        offset[dim], size[dim] = start, length
        return Box(tuple(offset), tuple(size))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offset, self.ends(), strict=True))}]"


class Stored(Protocol):
    """Tensors on disk, by name. A read needs no more memory than its result, and communicates nothing."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, on the CPU, in the stored dtype. It may be mapped from the file: do not keep it."""


class Overlap(NamedTuple):
    """The same entries as a box of the global tensor and as a box of a rank's shard."""

    full: Box
    shard: Box


def global_shape(shard_shape: Sequence[int], shards: Sequence[PlacedShard]) -> tuple[int, ...]:
    """Return the global shape of a tensor, without padding, from the shape of a rank's shard."""
    shape = list(shard_shape)
    for shard, _ in reversed(shards):
        shape[shard.dim] = sum(shard.blocks)
    return tuple(shape)


def overlaps(box: Box, shards: Sequence[PlacedShard]) -> Iterator[Overlap]:
    """Yield the parts of a box that are not padding, with their position in the global tensor.

    Args:
        box: a box of a rank's shard.
        shards: the shardings of the tensor, outermost first; empty if it is replicated.
    """
    if not box.numel:
        return
    if not shards:
        yield Overlap(full=box, shard=box)
        return
    # The innermost axis shards the shard of the outer ones. Cut there, then move the result back.
    *others, (shard, rank) = shards
    dim, first, last = shard.dim, box.offset[shard.dim], box.ends()[shard.dim]
    for interval in shard.intervals_of(rank):
        begin, end = max(first, interval.shard), min(last, interval.shard + interval.length)
        if begin < end:
            shift = interval.full - interval.shard
            for outer in overlaps(box.along(dim, begin + shift, end - begin), others):
                in_outer = outer.shard
                shard_box = in_outer.along(dim, in_outer.offset[dim] - shift, in_outer.size[dim])
                yield Overlap(full=outer.full, shard=shard_box)


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that together are the entries `start` to `stop` of a tensor, in row-major order.

    Each box is contiguous in memory if the tensor is.
    """
    if not shape:
        if start < stop:
            yield Box((), ())
        return
    row = prod(shape[1:])
    while start < stop:
        first, offset = divmod(start, row)
        if offset == 0 and stop - start >= row:
            count = (stop - start) // row
            yield Box((first, *(0 for _ in shape[1:])), (count, *shape[1:]))
            start += count * row
        else:
            end = min(stop, (first + 1) * row)
            for box in flat_boxes(offset, end - first * row, shape[1:]):
                yield Box((first, *box.offset), (1, *box.size))
            start = end


def coverage_errors(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Return errors if the boxes do not cover every entry of a tensor of this shape exactly once."""
    full = Box.full(shape)
    errors = [f"{box} is out of its bounds" for box in boxes if box.numel and box.common(full) != box]
    errors += [f"{a} and {b} overlap" for a, b in _overlaps(boxes)]
    covered = sum(box.numel for box in boxes)
    if not errors and covered != full.numel:
        errors.append(f"{full.numel - covered} of its {full.numel} entries are missing")
    return errors


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield the pairs that intersect. A box is compared only with boxes that end after its start in dimension 0."""
    open_boxes: list[Box] = []
    for box in sorted(box for box in boxes if box.numel):
        begin = box.offset[:1]  # empty for a scalar
        open_boxes = [other for other in open_boxes if not begin or other.ends()[:1] > begin]
        yield from ((other, box) for other in open_boxes if other.common(box) is not None)
        open_boxes.append(box)
