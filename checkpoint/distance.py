"""How far two tensors, or two plain values, are apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor

from .box import Box, flat_boxes

CHUNK = 1 << 20  # entries that are read at once: some 8 MiB for each of a few tensors in float64

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The largest differences of two tensors.

    Args:
        absolute: the largest |a − b|; infinite where one of them is no number, or infinite, and the other is not.
        relative: the largest |a − b| / max(|a|, |b|).
        magnitude: the largest finite |a| or |b|.
        differing: entries that are not equal to the bit, of tensors of one format; else that are not equal.
        entries: of all.
    """

    absolute: float = 0.0
    relative: float = 0.0
    magnitude: float = 0.0
    differing: int = 0
    entries: int = 0

    def joined(self, other: "Distance") -> "Distance":
        """Of both."""
        return Distance(
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            magnitude=max(self.magnitude, other.magnitude),
            differing=self.differing + other.differing,
            entries=self.entries + other.entries,
        )

    def exceeds(self, tolerance: float) -> bool:
        """Whether they differ: by more than a share of the largest entry; by any bit where the share is 0."""
        return self.differing > 0 if tolerance == 0 else self.absolute > tolerance * self.magnitude


def distance_between(a: Tensor, b: Tensor) -> Distance:
    """How far two tensors of one shape are apart."""
    if not a.numel():
        return Distance()
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(each.to(torch.complex128)) for each in (a, b))
    differing = int((_bits(a) != _bits(b)).sum()) if a.dtype == b.dtype else None
    if differing == 0:
        return Distance(magnitude=_magnitude(a.double()), entries=a.numel())
    x, y = a.double(), b.double()
    difference = (x - y).abs_()
    alike = (x == y) | (x.isnan() & y.isnan())  # infinities too
    difference.masked_fill_(alike, 0.0).nan_to_num_(nan=inf, posinf=inf)
    relative = difference / torch.maximum(x.abs(), y.abs()).nan_to_num_(nan=inf, posinf=inf)
    relative.masked_fill_(alike, 0.0).nan_to_num_(nan=inf, posinf=inf)  # inf / inf: no number
    return Distance(
        absolute=difference.max().item(),
        relative=relative.max().item(),
        magnitude=max(_magnitude(x), _magnitude(y)),
        differing=int((~alike).sum()) if differing is None else differing,
        entries=a.numel(),
    )


def chunks_of(shape: Sequence[int], entries: int = CHUNK) -> Iterator[Box]:
    """Boxes of a tensor, end to end in row-major order, of at most so many entries each."""
    whole = prod(shape)
    for start in range(0, whole, entries):
        yield from flat_boxes(start, min(start + entries, whole), shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def _magnitude(values: Tensor) -> float:
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0).max().item()
