"""Counting where a process reads numbers from tensors, which on a GPU waits until all that was launched has run."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

# Reads of what is on the host on a GPU machine too, by file and function, with the reason.
ON_THE_HOST = {
    ("cluster/random.py", "_drawn"): "a number of the CPU's generator",
    ("cluster/agree.py", "_extend"): "a batch as the dataloader gives it; on a device it is hashed there",
    ("sequence/block_mask.py", "block_mask"): "a number; older releases of transformers alone give a tensor",
    ("pipeline/known_masks.py", "__torch_function__"): "numbers that the host has kept",
    ("pipeline/transport.py", "_description"): "messages between CPUs",
    ("layers/parallel_module.py", "require_all"): "of CPU tensors alone, else an assertion on the device",
}

Places = Counter[tuple[str, str]]  # by file and function


class HostReads(TorchDispatchMode):
    """Counts where numbers are read from tensors; what dispatches nothing on CPUs is counted by `host_reads`."""

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
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if chooses or func._schema.name in self.NAMES:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Count a read for the innermost function outside of torch, but not those of the optimizer's own counters."""
        frame = sys._getframe(1)
        while "/torch/" in (file := frame.f_code.co_filename) or file == __file__:
            if "/torch/optim/" in file:  # of steps: on the CPU, or read by kernels on the device
                return
            assert frame.f_back is not None
            frame = frame.f_back
        place = "/".join(file.split("/")[-2:]), frame.f_code.co_name
        if place not in ON_THE_HOST:
            self.places[place] += 1


@contextmanager
def host_reads() -> Iterator[Places]:
    """Count host reads by place."""
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
