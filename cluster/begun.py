"""Collectives over a group that have begun: what computes meanwhile is the caller's. No gradient passes.

The number of rows of what is gathered and of what is summed is the size of the group. Every rank of a group must call,
in the same order, with lengths that are equal on all. Steps round a ring are ring.py.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Waitable
from .renamed import all_gather_single, reduce_scatter_single


def begin_gather(own: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to gather tensors of one shape; what is returned waits and gives them stacked (T, *shape)."""
    rows = own.new_empty((group.size(), *own.shape))
    # Flat: gloo takes rows end to end in dim 0 alone.
    return _waiting(begin_all_gather(rows.view(-1), own.contiguous().view(-1), group), rows)


def begin_sum_of_rows(rows: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum (T, *shape) over the ranks; what is returned waits and gives this rank's row of the sum."""
    own = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    return _waiting(begin_sum_scatter(own.view(-1), rows.contiguous().view(-1), group), own)


def begin_all_gather(whole: Tensor, piece: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Begin to fill a 1-D buffer with the ranks' 1-D pieces, in their order. One all-gather.

    On CUDA it begins behind what the current stream was given, and waiting holds up the stream, not the host.
    """
    work: Waitable = all_gather_single(whole, piece, group=group, async_op=True)
    return work


def begin_sum_scatter(piece: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Begin to bring this rank's piece of the sum of all 1-D buffers into `piece`. One reduce-scatter; as above."""
    work: Waitable = reduce_scatter_single(piece, whole, group=group, async_op=True)
    return work


def _waiting(work: Waitable, result: Tensor) -> Callable[[], Tensor]:
    def end() -> Tensor:
        work.wait()
        return result

    return end
