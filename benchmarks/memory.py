"""Bytes of contenders' own tensors. Times are rounds.py.

The most that a step needs is not measured here: the contenders share their processes, whose resident memory shows only
the largest of them, and torch's profiler misses what gloo's threads free, so that its peaks differ from run to run.
zero_memory.py measures it, in processes of their own.
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
        """Tensors of this rank, by kind; they may share memory."""


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


def held_at_stage(stage: int, *, elements: int, num_ranks: int) -> dict[str, int]:
    """The bytes that a stage of ZeRO is to hold on a rank, in float32 with AdamW.

    Args:
        stage: 0, 1 or 2.
        elements: of all parameters.
        num_ranks: that share out.
    """
    part = elements // num_ranks
    return {
        "parameters": 4 * elements,
        "gradients": 4 * (part if stage == 2 else elements),
        "masters": 0,  # the parameters are their own
        "states": 8 * (part if stage else elements),
    }


def require_held(name: str, held: Mapping[str, int], expected: Mapping[str, int], *, padding: int) -> None:
    """Compare what a contender holds with what it is to hold.

    Args:
        name: the contender's.
        held, expected: bytes by kind; kinds that nothing is said of are not compared.
        padding: elements that it may hold in addition, of each kind.

    Raises:
        ValueError: it holds less, or more than that.
    """
    errors = [
        f"{held[kind]} bytes of {kind} instead of {size}"
        for kind, size in expected.items()
        if not size <= held[kind] <= size + (8 * padding if size else 0)
    ]
    if errors:
        raise ValueError(f"{name} holds {'; '.join(errors)}")
