"""Memory of the CPU for what the inner optimizer steps, and the copies to it and back. Whose, is bucket.py.

[Note: copies between device and CPU] All copies of a step are made on the device's current stream, from and to pinned
memory, without waiting. Gradients go out behind whatever reduced and scaled them, since that was given to the same
stream or waited for by it; before the host reads any of them `wait_for_copies` waits for the stream, once for all
buckets. Parameters come in behind it: the all-gather and the next forward are given to the stream, or wait for it,
after them. The host writes to masters while a copy to the device may still read them only in the next step, and there
after `wait_for_copies`, or after reading the parameters, both of which are behind that copy on the stream. Loading a
state writes to them at any time, and is followed by a copy of all masters on the same stream, so that what was torn by
it is overwritten. No test has run on CUDA; without it the memory is as separate, and copies are done when they return.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer


def host_copy(values: Tensor) -> Tensor:
    """The same values in new memory of the CPU, pinned where they are on CUDA."""
    copy = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
    return copy.copy_(values)


def wait_for_copies(device: torch.device) -> None:
    """Have all that the device's current stream was given; see [Note: copies between device and CPU]."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# torch.optim's that have a fused kernel on CPUs; a subclass may do something of its own.
_FUSED_ON_CPU = frozenset({torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})


def choose_fused_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer step by torch's fused CPU kernel, where it has one and the user chose nothing."""
    if type(optimizer) not in _FUSED_ON_CPU:
        return
    for group in optimizer.param_groups:
        # Fused SGD fails where some parameters have momentum and others, new ones, have none yet.
        mixes = group.get("momentum", 0) != 0
        if group["fused"] is None and not (group["foreach"] or group["differentiable"] or mixes):
            group["fused"] = True
