"""All that a run carries from step to step, whole, and what differs between two of them.

How checkpoints cut tensors into boxes is left out here, to share no mistake with it: ranks gather what they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.placement import placement_of
from ..plugins.hybrid_model import HybridParallelModule
from ..zero.bucket import Bucket, Slot
from ..zero.optimizer import ShardedOptimizer
from .gather import gather_whole

PARAMETER, MASTER = "parameter/", "master/"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a run is at a step.

    Args:
        tensors: "parameter/NAME" as it computes, "master/NAME" as it is stepped, "STATE/NAME" of the optimizer.
        values: plain ones by name: states that are numbers, options of parameter groups, loss scale, skipped steps.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def contents_of(model: HybridParallelModule, optimizer: ShardedOptimizer) -> Contents:
    """The contents, whole on global rank 0; elsewhere without tensors. Collective over the world."""
    states, numbers = _states(optimizer)
    kinds = {MASTER: optimizer.masters(), **states}
    tensors = _whole(model, PARAMETER, model.tensors())
    for prefix, held in kinds.items():
        tensors |= _whole(model, prefix, held)
    values: dict[str, Any] = {name: sorted(found) for name, found in numbers.items()}
    values |= {
        f"group {index}": {name: value for name, value in group.items() if name != "params"}
        for index, group in enumerate(optimizer.param_groups)
    }
    values |= {"loss scaler": optimizer.scaler_state(), "skipped steps": optimizer.skipped_steps}
    return Contents(tensors=tensors, values=values)


def differing(saved: Contents, loaded: Contents) -> list[str]:
    """Names of what is not the same, bit for bit.

    Where the precision changed parameters must be what was stepped before, rounded; a loss scale that only one of the
    precisions has is left out.
    """
    expected = {name: _expected(name, saved, loaded.tensors.get(name)) for name in saved.tensors}
    found = [
        name
        for name in {**expected, **loaded.tensors}
        if name not in expected
        or name not in loaded.tensors
        or not _equal(expected[name], loaded.tensors[name])
    ]
    values = [
        name
        for name in {**saved.values, **loaded.values}
        if saved.values.get(name) != loaded.values.get(name)
    ]
    if None in (saved.values["loss scaler"], loaded.values["loss scaler"]):
        values = [name for name in values if name != "loss scaler"]
    return found + values


def _expected(name: str, saved: Contents, loaded: Tensor | None) -> Tensor:
    """What is to be found under a name: what was saved, or in another format its master in that."""
    present = saved.tensors[name]
    if loaded is None or loaded.dtype is present.dtype:
        return present
    master = MASTER + name.removeprefix(PARAMETER) if name.startswith(PARAMETER) else name
    return saved.tensors.get(master, present).to(loaded.dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that a NaN equals itself and zeros of two signs differ."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def _whole(model: HybridParallelModule, prefix: str, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known = model.tensors()
    placements = {name: placement_of(known[name]) for name in held}
    whole = gather_whole(held, placements, model.mesh)
    return {
        prefix + name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in whole.items()
    }


def _states(optimizer: ShardedOptimizer) -> tuple[dict[str, dict[str, Tensor]], dict[str, set[float]]]:
    """States by kind and parameter, of all that this rank's stage holds; and those that are numbers, of all ranks.

    Collective over the world. Ranks that share out a parameter each have its numbers: different ones are all there.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _own_states(optimizer))
    names: dict[str, set[str]] = {}  # of parameters, by the kind that some rank has of them
    numbers: dict[str, set[float]] = {}
    for tensors, scalars in every:
        for kind, name in tensors:
            names.setdefault(kind, set()).add(name)
        for key, number in scalars:
            numbers.setdefault(key, set()).add(number)
    return {f"{kind}/": _gathered(optimizer, kind, of) for kind, of in sorted(names.items())}, numbers


def _own_states(optimizer: ShardedOptimizer) -> tuple[list[tuple[str, str]], list[tuple[str, float]]]:
    """Kind and parameter of the states that this rank has a part of; and names and values of numbers."""
    tensors, scalars = [], []
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            for kind, value in _state(optimizer, slot).items():
                if isinstance(value, Tensor) and value.dim():
                    tensors.append((kind, slot.managed.name))
                else:
                    scalars.append((f"{kind}/{slot.managed.name}", float(value)))
    return tensors, scalars


def _gathered(optimizer: ShardedOptimizer, kind: str, names: set[str]) -> dict[str, Tensor]:
    """The states of a kind in their parameters' shapes. Collective over the data axis."""
    found: dict[str, Tensor] = {}
    for bucket in optimizer.buckets:
        whole = bucket.partition.gathered(_flat(optimizer, bucket, kind))
        found |= {name: part for name, part in bucket.unflattened(whole).items() if name in names}
    return found


def _flat(optimizer: ShardedOptimizer, bucket: Bucket, kind: str) -> Tensor:
    """This rank's states of a kind, each where its master lies in the bucket's slice."""
    flat = torch.zeros_like(bucket.masters)
    first = bucket.partition.index * bucket.masters.numel()
    for slot in bucket.slots:
        if (value := _state(optimizer, slot).get(kind)) is not None:
            start = slot.start + slot.piece_start - first
            flat[start : start + value.numel()] = value
    return flat


def _state(optimizer: ShardedOptimizer, slot: Slot) -> dict[str, Any]:
    """What the optimizer keeps of this rank's piece of a parameter; nothing where it has none."""
    return {} if slot.piece is None else optimizer.inner.state.get(slot.piece, {})
