"""What this rank holds of the tensors that are saved and loaded, as boxes of whole ones. Files are tensor_file.py."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..cluster.placement import Placement
from .box import Box, cuts_of, flat_boxes, whole_shape
from .copies import Copies


class Part(NamedTuple):
    """A box of a whole tensor, and the memory of this rank that holds it, as a view of the box's size."""

    box: Box
    local: Tensor


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """What a rank holds of a tensor; no padding.

    Args:
        name: of the tensor, the same on every rank.
        shape: of the whole.
        dtype: of the memory.
        parts: disjoint boxes; none where the rank holds nothing but padding.
        counts: whether this rank may be the one that saves them; of ranks that hold the same boxes several may, but
            none whose boxes overlap with another's otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    counts: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def copied(self, copies: Copies) -> "HeldTensor":
        """The same in other memory, on the CPU."""
        parts = tuple(Part(part.box, copies.copy(part.local)) for part in self.parts)
        return replace(self, parts=parts)


def held_piece(
    name: str, piece: Tensor, placement: Placement | None, rank: int, *, counts: bool = True
) -> HeldTensor:
    """A tensor of which this rank holds a piece, all of it in one tensor.

    Args:
        piece: in the shape that the placement gives it, padding included.
        placement: how the whole is cut, None where it is not.
        rank: of the axis that it is cut over.
    """
    return _held(name, piece, [Box.whole(piece.shape)], tuple(piece.shape), placement, rank, counts)


def held_slice(
    name: str,
    flat: Tensor,
    start: int,
    piece_shape: Iterable[int],
    placement: Placement | None,
    rank: int,
    *,
    counts: bool = True,
) -> HeldTensor:
    """A tensor of whose piece this rank holds a stretch, as ZeRO shares it out.

    Args:
        flat: 1-D, the stretch.
        start: where it begins in the flattened piece.
        piece_shape: of the whole piece, padding included.
        placement, rank: as of `held_piece`.
    """
    shape = tuple(piece_shape)
    boxes = list(flat_boxes(start, start + flat.numel(), shape))
    return _held(name, flat, boxes, shape, placement, rank, counts)


def held_dtensor(name: str, tensor: DTensor) -> HeldTensor:
    """A tensor that torch shares out in rows. Every rank that holds a row may save it."""
    local = tensor.to_local()
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offset), tuple(size))
    if tuple(local.shape) != box.size:
        raise AssertionError(f"{name} has {tuple(local.shape)} here, and torch says {box}")
    parts = (Part(box, local.detach()),) if box.numel else ()
    return HeldTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=parts)


def _held(
    name: str,
    memory: Tensor,
    boxes: list[Box],
    piece_shape: tuple[int, ...],
    placement: Placement | None,
    rank: int,
    counts: bool,
) -> HeldTensor:
    """From boxes of a piece that lie end to end in memory."""
    memory, parts, start = memory.detach(), [], 0
    flat = None if len(boxes) == 1 and tuple(memory.shape) == boxes[0].size else memory.view(-1)
    for box in boxes:
        covering = memory if flat is None else flat[start : start + box.numel].view(box.size)
        parts += [Part(cut.whole, covering[cut.piece.within(box)]) for cut in cuts_of(box, placement, rank)]
        start += box.numel
    return HeldTensor(
        name=name,
        shape=whole_shape(piece_shape, placement),
        dtype=memory.dtype,
        parts=tuple(parts),
        counts=counts,
    )
