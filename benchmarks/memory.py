"""What contenders hold, in bytes of their own tensors. Times are rounds.py.

The most that a step needs is not measured: the contenders share their processes, whose resident memory shows only
the largest of them, and torch's profiler misses what gloo's threads free, so that its peaks differ from run to run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from contender import Contender
from torch import Tensor
from torch.distributed.tensor import DTensor


class Holder(Contender, Protocol):
    """A contender that shows its tensors."""

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """What this rank holds, by kind; tensors may share memory."""


def measure_held(contenders: Sequence[Holder]) -> dict[str, dict[str, int]]:
    """Bytes by contender and kind of tensor, between backward and the optimizer's step. Communicates.

    Args:
        contenders: each has stepped before, so that it has its optimizer's states. Each is run once, and its
            gradients are forgotten.

    Returns:
        The largest of all ranks.
    """
    found = {}
    for contender in contenders:
        contender.compute()
        own = {kind: held_bytes(tensors) for kind, tensors in contender.tensors().items()}
        contender.forget()
        largest = torch.tensor(list(own.values()), dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found[contender.name] = dict(zip(own, largest.tolist(), strict=True))
    return found


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory behind some tensors, shared memory once; of a DTensor what is on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
