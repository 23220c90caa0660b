"""Bytes of contenders' own tensors.

The peak of a step is not measured here. The contenders share their processes, whose resident memory shows only
the largest of them. torch's profiler misses memory that gloo's threads free, so that its peaks differ from run to run.
zero_memory.py measures the peak, in separate processes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from contender import Contender
from torch import Tensor
from torch.distributed.tensor import DTensor


class Holder(Contender, Protocol):
    """A contender that lists its tensors."""

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """Return the tensors of this rank, by kind; they may share memory."""


def measure_held(contenders: Sequence[Holder]) -> dict[str, dict[str, int]]:
    """Return bytes by contender and kind of tensor, between backward and the optimizer's step. Communicates.

    Args:
        contenders: each has taken a step, so that it has its optimizer's states. Each runs once, and its gradients
            are dropped.

    Returns:
        The largest of all ranks.
    """
    held = {}
    for contender in contenders:
        contender.compute()
        local_bytes = {kind: held_bytes(tensors) for kind, tensors in contender.tensors().items()}
        contender.forget()
        held[contender.name] = largest_of_all_ranks(local_bytes)
    return held


def largest_of_all_ranks(local_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the largest number of all ranks for every kind; all ranks have the same kinds. Communicates."""
    largest = torch.tensor(list(local_bytes.values()), dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(local_bytes, largest.tolist(), strict=True))


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of some tensors, shared memory once; for a DTensor that of its local shard."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_at_stage(stage: int, *, elements: int, num_ranks: int) -> dict[str, int]:
    """Return the expected bytes of a ZeRO stage on a rank, in float32 with AdamW.

    Args:
        stage: 0, 1 or 2.
        elements: the number of elements of all parameters.
        num_ranks: the number of ranks over which states and gradients are sharded.
    """
    slice_elements = elements // num_ranks
    return {
        "parameters": 4 * elements,
        "gradients": 4 * (slice_elements if stage == 2 else elements),
        "masters": 0,  # in float32 the parameters are the masters
        "states": 8 * (slice_elements if stage else elements),
    }


def require_held(name: str, held: Mapping[str, int], expected: Mapping[str, int], *, padding: int) -> None:
    """Compare the bytes of a contender's tensors with the expected ones.

    Args:
        name: the contender's name.
        held, expected: bytes by kind; kinds without an expected number are not compared.
        padding: elements of padding that are allowed for each kind.

    Raises:
        ValueError: it has fewer bytes, or more than the padding allows.
    """
    errors = [
        f"{held[kind]} bytes of {kind} instead of {size}"
        for kind, size in expected.items()
        if not size <= held[kind] <= size + (8 * padding if size else 0)
    ]
    if errors:
        raise ValueError(f"{name} holds {'; '.join(errors)}")
