"""Collectives over a group that have begun: what computes meanwhile is the caller's. No gradient passes.

The number of rows of what is gathered and of what is summed is the size of the group. Every rank of a group must call,
in the same order.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .renamed import all_gather_single, reduce_scatter_single

# Of messages between neighbours; those of slices.py count from 0, those of read_sums.py from 2**20.
_TAG = 2**21


def begin_gather(own: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to gather tensors of one shape; what is returned waits and gives them stacked (T, *shape)."""
    rows = own.new_empty((group.size(), *own.shape))
    # Flat: gloo takes rows end to end in dim 0 alone.
    work = all_gather_single(rows.view(-1), own.contiguous().view(-1), group=group, async_op=True)
    return _waiting(work, rows)


def begin_sum_of_rows(rows: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum (T, *shape) over the ranks; what is returned waits and gives this rank's row of the sum."""
    own = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    work = reduce_scatter_single(own.view(-1), rows.contiguous().view(-1), group=group, async_op=True)
    return _waiting(work, own)


def begin_step(away: Tensor, arriving: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin one step round the ring of ranks: send to the next one and receive from the one before.

    Args:
        away: what the next rank gets; not to be changed until the step has ended.
        arriving: where what the rank before sends is put, contiguous.
        group: the ring.

    Returns:
        What waits (a CUDA stream does, not the host) and gives `arriving`.
    """
    size, rank = group.size(), group.rank()
    operations = [
        dist.P2POp(operation, tensor, group=group, tag=_TAG, group_peer=(rank + way) % size)
        for operation, tensor, way in ((dist.isend, away.contiguous(), 1), (dist.irecv, arriving, -1))
    ]
    works = dist.batch_isend_irecv(operations)

    def end() -> Tensor:
        while works:  # each once: gloo would wait for a further tensor
            works.pop().wait()
        operations.clear()  # whose tensors had to live until here
        return arriving

    return end


def _waiting(work: dist.Work, result: Tensor) -> Callable[[], Tensor]:
    def end() -> Tensor:
        work.wait()
        return result

    return end
