"""Products of linear layers, stretch by stretch, between the steps of gathering and summing sequences.

Of a region's input the first layer multiplies each part as soon as it comes; the layer that ends the region computes a
part for one rank while what it computed for another travels on, and its backward multiplies gradients as they come
(arXiv:2105.05720 interleaves such steps inside kernels; here they are steps between ranks).
"""

# B batch, S true sequence, s part of a rank with padding, I input features, O output features, T size of the group

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from ...cluster.collectives import begin_gather
from ...cluster.ring import begin_step
from ...pipeline.linear import Keep
from .regions import RegionSequence

# Where a stretch begins in the true sequence, and the stretch, without padding.
Stretch = tuple[int, Tensor]


def gather_beside_product(
    part_BsI: Tensor, sequence: RegionSequence, length: int, product: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Gather a sequence in T−1 steps round the ring; while one is under way what has come is multiplied.

    Args:
        part_BsI: this rank's part.
        sequence: says of what.
        length: of the true sequence.
        product: of a stretch of it; None computes nothing.

    Returns:
        (B, S, I), and what `product` makes of it, (B, S, O).
    """
    whole = part_BsI.new_empty((part_BsI.shape[0], length, part_BsI.shape[2]))
    made: Tensor | None = None
    for start, stretch in _round_the_ring(part_BsI, sequence, length):
        whole[:, start : start + stretch.shape[1]] = stretch
        if product is not None:
            of_stretch = product(stretch)
            made = whole.new_empty((*whole.shape[:2], of_stretch.shape[-1])) if made is None else made
            made[:, start : start + stretch.shape[1]] = of_stretch
    return whole, made


def row_product(x_BSI: Tensor, weight: Tensor, sequence: RegionSequence, keep: Keep) -> Tensor:
    """The product of the layer that ends a region, summed over the ranks and scattered; gradients gathered meanwhile.

    Args:
        x_BSI: this rank's input features; or (B·S, I).
        weight: of these.
        sequence: with the style "ring" sums go round the ring between products; else one reduce-scatter follows them.
        keep: where the weight's gradient may wait.

    Returns:
        (B, s, O), or (B·s, O).
    """
    if x_BSI.ndim == 2:
        by_sample = x_BSI.unflatten(0, (-1, sequence.axis.length))
        return row_product(by_sample, weight, sequence, keep).flatten(0, 1)
    out: Tensor = _RowProduct.apply(x_BSI, weight, sequence, keep)
    return out


class _RowProduct(Function):
    @staticmethod
    def forward(ctx: Any, x_BSI: Tensor, weight: Tensor, sequence: RegionSequence, keep: Keep) -> Tensor:
        ctx.save_for_backward(x_BSI, weight)
        ctx.sequence, ctx.keep = sequence, keep
        weight_OI = weight.T if keep.is_transposed else weight
        if sequence.style == "ring":
            return _sum_round_the_ring(x_BSI, weight_OI, sequence)
        return sequence.begin_own_sum(linear(x_BSI, weight_OI))()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BsO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_BSI, weight = ctx.saved_tensors
        sequence, keep = ctx.sequence, ctx.keep
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        arriving = _round_the_ring if sequence.style == "ring" else _own_first
        weight_IO = weight if keep.is_transposed else weight.T
        gradient_BSO = gradient_BsO.new_empty((*x_BSI.shape[:2], gradient_BsO.shape[2]))
        of_input = torch.empty_like(x_BSI) if needs_input else None
        for start, stretch in arriving(gradient_BsO, sequence, x_BSI.shape[1]):
            stop = start + stretch.shape[1]
            gradient_BSO[:, start:stop] = stretch
            if of_input is not None:
                of_input[:, start:stop] = linear(stretch, weight_IO)
        of_weight = keep.gradient(x_BSI, gradient_BSO.flatten(0, 1)) if needs_weight else None
        return of_input, of_weight, None, None


def _round_the_ring(part: Tensor, sequence: RegionSequence, length: int) -> Iterator[Stretch]:
    """The parts of all ranks, from this one's on as they come; the next is under way while one is used."""
    group, width = sequence.axis.group, part.shape[1]
    size, rank, held = group.size(), group.rank(), part.contiguous()
    for step in range(size):
        end = begin_step(held, group) if step < size - 1 else None
        start = (rank - step) % size * width
        yield _true(held, start, length)
        held = held if end is None else end()


def _own_first(part: Tensor, sequence: RegionSequence, length: int) -> Iterator[Stretch]:
    """This rank's part, while those of the others are gathered, then what stands before and behind it."""
    width = part.shape[1]
    end = begin_gather(part, sequence.axis.group)
    start, own = _true(part, sequence.axis.rank * width, length)
    yield start, own
    whole = end().transpose(0, 1).flatten(1, 2)[:, :length]
    yield 0, whole[:, :start]
    yield start + own.shape[1], whole[:, start + own.shape[1] :]


def _true(part: Tensor, start: int, length: int) -> Stretch:
    """A part that begins at `start` without its padding."""
    start = min(start, length)
    return start, part[:, : min(length - start, part.shape[1])]


def _sum_round_the_ring(x_BSI: Tensor, weight_OI: Tensor, sequence: RegionSequence) -> Tensor:
    """This rank's part of the sum of all ranks' products, in T−1 steps.

    What is for the rank before goes first, and each rank on the way adds its own, computed while that arrives.
    """
    group, length = sequence.axis.group, x_BSI.shape[1]
    size, rank, width = group.size(), group.rank(), sequence.axis.order.padded(length) // group.size()
    end: Callable[[], Tensor] | None = None
    for step in range(size):
        start = (rank - 1 - step) % size * width
        stretch = x_BSI[:, start : start + width]
        own = pad(linear(stretch, weight_OI), (0, 0, 0, width - stretch.shape[1]))
        total = own if end is None else end().add_(own)
        end = begin_step(total, group) if step < size - 1 else None
    return total
