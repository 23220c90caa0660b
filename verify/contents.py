"""All that a run carries from step to step, whole, and what differs between two of them.

How checkpoints cut tensors into boxes is left out here, to share no mistake with it: ranks gather what they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.gather import gather_whole
from ..cluster.placement import placement_of
from ..plugins.hybrid_module import HybridParallelModule
from ..zero.bucket import Bucket
from ..zero.optimizer import ShardedOptimizer

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
    whole = gather_whole(held, placements, model.plugin.mesh)
    return {
        prefix + name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in whole.items()
    }


def _states(
    optimizer: ShardedOptimizer,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, set[float]]]:
    """The optimizer's states by kind and parameter, each whole piece that this rank's stage holds; and numbers.

    Collective over the world. Ranks that share out a parameter have its numbers several times, equal ones once.
    """
    own: dict[str, dict[str, float]] = {}
    kinds: dict[str, set[str]] = {}  # by parameter
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            state = {} if slot.piece is None else optimizer.inner.state.get(slot.piece, {})
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    kinds.setdefault(slot.managed.name, set()).add(kind)
                else:
                    own.setdefault(kind, {})[slot.managed.name] = float(value)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (kinds, own))
    numbers: dict[str, set[float]] = {}
    present: dict[str, set[str]] = {}
    for of_rank, found in every:
        for name, names in of_rank.items():
            present.setdefault(name, set()).update(names)
        for kind, by_name in found.items():
            for name, number in by_name.items():
                numbers.setdefault(f"{kind}/{name}", set()).add(number)
    states: dict[str, dict[str, Tensor]] = {}
    for kind in sorted({kind for names in present.values() for kind in names}):
        named = {
            name: part
            for bucket in optimizer.buckets
            for name, part in bucket.unflattened(
                bucket.partition.gathered(_flat(optimizer, bucket, kind))
            ).items()
        }
        states[f"{kind}/"] = {name: part for name, part in named.items() if kind in present.get(name, ())}
    return states, numbers


def _flat(optimizer: ShardedOptimizer, bucket: Bucket, kind: str) -> Tensor:
    """A state where the masters are that it belongs to."""
    flat = torch.zeros_like(bucket.masters)
    first = bucket.partition.index * bucket.masters.numel()
    for slot in bucket.slots:
        state = {} if slot.piece is None else optimizer.inner.state.get(slot.piece, {})
        if slot.piece is not None and kind in state:
            start = slot.start + slot.piece_start - first
            flat[start : start + slot.piece.numel()] = state[kind]
    return flat
