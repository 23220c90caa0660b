"""The all-reduce of layers, by the method of a process group.

torch's own function takes more host time for checks of its arguments than for the call, and a layer makes four. torch's
recorders and profiler see the method. Reports of hangs name the functions of this file like torch's own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions


def _options(*, async_op: bool) -> AllreduceOptions:
    """Return the options of a sum."""
    options = AllreduceOptions()
    options.asyncOp = async_op
    return options


_SYNC, _ASYNC = _options(async_op=False), _options(async_op=True)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Sum a contiguous tensor over a group, in place, as `torch.distributed.all_reduce` does.

    Args:
        tensor: the addend of this rank; becomes the sum.
        group: every rank of it must call.
        async_op: return the handle of the communication in flight.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    work = group.allreduce([tensor], _ASYNC if async_op else _SYNC)
    if async_op:
        return work
    if work is not None:  # NCCL has enqueued the sum on the current stream, and returns nothing to wait for
        work.wait()
    return None
