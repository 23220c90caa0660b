"""Counts of host reads of tensors, each of which on a GPU waits for all kernels launched before."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.pipeline import counted_loss
from echelon.pipeline.host_masks import TensorWithHostCopy

# Reads of tensors that are on the host also on a GPU machine, by file and function, with the reason.
ON_THE_HOST = {
    ("cluster/forward_random.py", "_drawn"): "a number of the CPU's generator",
    ("cluster/hashes.py", "_extend"): "a batch as the dataloader gives it; on a device it is hashed there",
    ("sequence/block_mask.py", "block_mask"): "a number; older releases of transformers alone give a tensor",
    ("pipeline/host_masks.py", "__torch_function__"): "numbers that the host has kept",
    ("pipeline/host_masks.py", "with_host_copies"): "a batch as the dataloader gives it",
    ("pipeline/transport.py", "_receive_description"): "messages between CPUs",
    ("layers/parallel_module.py", "require_all"): "of CPU tensors alone, else an assertion on the device",
}

Places = Counter[tuple[str, str]]  # by file and function


class HostReads(TorchDispatchMode):
    """Counter of host reads that dispatch an operator; `host_reads` counts the others."""

    supports_higher_order_operators = True
    NAMES = (
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
    )

    def __init__(self) -> None:
        super().__init__()
        self.places: Places = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # a kernel
            return func(*args, **(kwargs or {}))
        chooses = func._schema.name == "aten::index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if chooses or func._schema.name in self.NAMES:
            self.note(args[0])
        return func(*args, **(kwargs or {}))

    def note(self, read: Any = None) -> None:
        """Count a read for its calling place, except for step counters of optimizers.

        Args:
            read: the tensor, if known; a `TensorWithHostCopy` itself is on the device.
        """
        place = place_outside_torch()
        if place is not None and (place not in ON_THE_HOST or isinstance(read, TensorWithHostCopy)):
            self.places[place] += 1


def place_outside_torch(*besides: str) -> tuple[str, str] | None:
    """Return file and function of the innermost call outside of torch, of files that pass calls on, and of `besides`.

    None within torch's optimizers, whose step counters are on the CPU or are read by kernels on the device, and in
    autograd's backward threads.
    """
    frame, passing = sys._getframe(1), (__file__, counted_loss.__file__, *besides)  # they pass calls on
    while "/torch/" in (file := frame.f_code.co_filename) or file in passing or _is_inner(frame):
        if "/torch/optim/" in file:
            return None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return "/".join(file.split("/")[-2:]), frame.f_code.co_name


def _is_inner(frame: FrameType) -> bool:
    """Return True for a comprehension: from Python 3.12 on it has no frame of its own."""
    return frame.f_code.co_name in ("<dictcomp>", "<listcomp>", "<setcomp>")


@contextmanager
def host_reads() -> Iterator[Places]:
    """Count the host reads within the block by place."""
    reads = HostReads()

    def noting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.note()
            return original(self, *args, **kwargs)

        return noted

    with ExitStack() as stack:
        for name in ("tolist", "numpy", "cpu"):
            stack.enter_context(patch.object(torch.Tensor, name, noting(name)))
        stack.enter_context(reads)
        yield reads.places
