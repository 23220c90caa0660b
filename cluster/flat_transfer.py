"""A flat buffer from the pieces of all ranks of a group, and the sum of all ranks' buffers into pieces.

Every rank of the group calls the same functions in the same order, with lengths that are equal on all.
"""

import torch.distributed as dist
from torch import Tensor

from .exchange import Waitable
from .renamed import all_gather_single, reduce_scatter_single


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
