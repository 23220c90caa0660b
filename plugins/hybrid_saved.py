"""What a rank holds of a split model and its optimizer, as checkpoints see it. Saving is checkpoint/'s."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..checkpoint.held import HeldTensor, held_piece, held_slice
from ..checkpoint.trained import Trained, TrainedPiece
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import Shard, placement_of
from ..zero.bucket import Slot
from ..zero.optimizer import ShardedOptimizer
from ..zero.state import layout_lines


def held_tensors(tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> dict[str, HeldTensor]:
    """Pieces of a model's tensors, by name. What several ranks hold each of them may save."""
    return {name: held_like(tensor, name, tensor, mesh=mesh) for name, tensor in tensors.items()}


def held_like(parameter: Tensor, name: str, tensor: Tensor, *, mesh: ParallelMesh) -> HeldTensor:
    """A tensor of which this rank holds the piece that it holds of a parameter."""
    return held_piece(name, tensor, placement_of(parameter), _rank(parameter, mesh))


def trained_shards(optimizer: ShardedOptimizer, mesh: ParallelMesh) -> Trained:
    """What this rank steps: stretches of its pieces of parameters."""
    groups: list[list[TrainedPiece]] = [[] for _ in optimizer.param_groups]
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            if slot.piece is not None:
                held = partial(_held, slot=slot, mesh=mesh)
                groups[bucket.group_index].append(TrainedPiece(slot.managed.name, slot.piece, held))
    return Trained(
        inner=optimizer.inner,
        groups=groups,
        has_masters=any(bucket.parameters.dtype != bucket.masters.dtype for bucket in optimizer.buckets),
        extra={"scaler": optimizer.scaler_state(), "skipped_steps": optimizer.skipped_steps},
        install=partial(_install, optimizer),
    )


def _held(name: str, flat: Tensor, *, slot: Slot, mesh: ParallelMesh) -> HeldTensor:
    parameter = slot.parameter
    return held_slice(
        name,
        flat,
        slot.piece_start,
        slot.weight.shape,
        placement_of(parameter),
        _rank(parameter, mesh),
        counts=slot.managed.counts,
    )


def _install(optimizer: ShardedOptimizer, state: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Take over a state of this layout; the masters were filled where they are. Collective over the data axis."""
    optimizer.load_state_dict(
        {
            **state,
            "masters": [bucket.masters for bucket in optimizer.buckets],
            "layout": layout_lines(optimizer.buckets),
            "scaler": extra["scaler"],
            "skipped_steps": extra["skipped_steps"],
        }
    )


def _rank(tensor: Tensor, mesh: ParallelMesh) -> int:
    """This rank of the axis that a tensor is cut over."""
    placement = placement_of(tensor)
    return mesh.rank(placement.axis) if isinstance(placement, Shard) else 0
