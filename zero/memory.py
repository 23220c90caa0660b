"""Memory of a sharded optimizer by kind, and the error of a rank that has none left: what holds it, what to change."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from .bucket import Bucket
from .buffers import BufferPool
from .owned import OwnedParameters
from .partition import ManagedParameter


def bytes_by_kind(
    buckets: Sequence[Bucket],
    owned: OwnedParameters,
    *,
    frozen: Sequence[ManagedParameter],
    states: Iterable[object],
    pool: BufferPool | None,
    is_offloaded: bool,
) -> dict[str, int]:
    """Return the bytes on this rank by kind, as `ShardedOptimizer.held_bytes` documents.

    Args:
        buckets: of the optimizer.
        owned: parameters that this rank steps in full.
        frozen: parameters without an optimizer.
        states: the values in the inner optimizer's states.
        pool: buffers for unsharded gradients at stage 2.
        is_offloaded: True if masters and states are on the CPU.
    """
    state_tensors = [state for state in states if isinstance(state, Tensor)]
    master_bytes = sum(bucket.masters.nbytes for bucket in buckets if bucket.has_masters) + owned.master_bytes
    state_bytes = sum(tensor.nbytes for tensor in state_tensors if tensor.numel() > 1)
    gradients = [
        bucket.gradient_slice if bucket.shards_gradients or bucket.gradients is None else bucket.gradients
        for bucket in buckets
    ]
    num_bytes = {
        "parameters": sum(bucket.parameters.nbytes for bucket in buckets)
        + sum(managed.parameter.nbytes for managed in frozen),
        "gradients": sum(buffer.nbytes for buffer in gradients),
        "buffers": 0 if pool is None else pool.nbytes,
        "masters": 0 if is_offloaded else master_bytes,
        "states": 0 if is_offloaded else state_bytes,
        "scalars": sum(tensor.nbytes for tensor in state_tensors if tensor.numel() <= 1),
    }
    if is_offloaded:
        slice_bytes = sum(bucket.stepped_gradients.nbytes for bucket in buckets if bucket.is_offloaded)
        owned_bytes = owned.master_bytes  # full float32 gradients are as large as full masters
        num_bytes["offloaded_gradients"] = slice_bytes + owned_bytes
        num_bytes["offloaded_masters"], num_bytes["offloaded_states"] = master_bytes, state_bytes
    return num_bytes


LAYOUT_ADVICE = "a larger tp_size or pp_size shards the model itself"


@dataclass(frozen=True)
class Sharding:
    """The options by which an optimizer's memory is sharded.

    Args:
        stage: of ZeRO.
        replicas: the number of ranks over which ZeRO shards.
        is_offloaded: True if masters and states are on the CPU.
    """

    stage: int
    replicas: int
    is_offloaded: bool


class HoldsMemory(Protocol):
    """An optimizer that knows its memory."""

    sharding: Sharding

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind."""
        ...


@contextmanager
def explaining_out_of_memory(describe: Callable[[], tuple[Sequence[str], Sequence[str]]]) -> Iterator[None]:
    """Raise an error of missing memory with what holds the memory and what to change; chained to torch's.

    Args:
        describe: returns what holds memory and what to change, when there is such an error.

    Raises:
        torch.OutOfMemoryError: in place of the one of the block.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held, advice = describe()
        first = str(error).partition("\n")[0].rstrip(". ")
        raise torch.OutOfMemoryError(
            f"{first}\nThis rank holds {'; '.join(held)}.\nTo need less, in this order: {'; '.join(advice)}."
        ) from error


def explains_out_of_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of an optimizer by `explaining_out_of_memory`."""

    @wraps(method)
    def run(self: HoldsMemory, *args: Any, **kwargs: Any) -> Any:
        with explaining_out_of_memory(lambda: memory_of(self)):
            return method(self, *args, **kwargs)

    return run


def memory_of(optimizer: HoldsMemory) -> tuple[list[str], list[str]]:
    """Return what an optimizer holds, the largest kind first, and what to change, in this order."""
    held = sorted(optimizer.held_bytes().items(), key=lambda kind: -kind[1])
    kinds = [f"{kind.replace('_', ' ')} {described_bytes(count)}" for kind, count in held if count]
    advice = (_advice(kind, optimizer.sharding) for kind, count in held if count)
    return kinds or ["nothing"], [*dict.fromkeys(text for text in advice if text), LAYOUT_ADVICE]


def _advice(kind: str, sharding: Sharding) -> str:
    """Return the option that shards or moves a kind of memory; empty if there is none."""
    replicated = f"shards it over the {sharding.replicas} replicas"
    if kind in ("masters", "states") and sharding.replicas > 1 and sharding.stage == 0:
        return f"zero_stage=1 for masters and states, {replicated}"
    if kind in ("masters", "states"):
        return "cpu_offload=True keeps masters and states on the CPU"
    if kind == "gradients" and sharding.replicas > 1 and sharding.stage < 2:
        return f"zero_stage=2 for gradients too, {replicated}"
    return ""


def described_bytes(count: float) -> str:
    """Write a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
