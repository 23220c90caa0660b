"""Whole tensors from the ranks' pieces, on one rank, to be compared. What is saved is sent by exchange.py."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.collectives import all_gather_single
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import Placement, Shard


def gather_whole(
    locals_: Mapping[str, Tensor], placements: Mapping[str, Placement | None], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """All tensors of the model, whole, on global rank 0; an empty dict elsewhere.

    Collective over the world: all-gather over the axis of each placement, then point-to-point over pp to the
    first stage. Equal copies (over dp and sp, and tied ones on several stages) are taken once.

    Args:
        locals_: this rank's piece of every tensor that its stage holds, by name, in one order on all ranks
            of an axis.
        placements: how each is spread over an axis.
        mesh: the mesh.
    """
    whole = {name: _over_axis(local, placements[name], mesh) for name, local in locals_.items()}
    if any(mesh.rank(axis) for axis in ("dp", "sp", "tp")):
        return {}
    return _over_pipeline(whole, mesh)


def _over_axis(local: Tensor, placement: Placement | None, mesh: ParallelMesh) -> Tensor:
    if not isinstance(placement, Shard) or placement.size == 1:
        return local.detach()
    pieces = local.new_empty((placement.size, *local.shape))
    all_gather_single(pieces.view(-1), local.detach().contiguous().view(-1), group=mesh.group(placement.axis))
    return placement.whole(pieces.unbind(0))


def _over_pipeline(held: dict[str, Tensor], mesh: ParallelMesh) -> dict[str, Tensor]:
    """On the first stage all stages' tensors, in their order; on the others nothing."""
    stage, group = mesh.rank("pp"), mesh.group("pp")
    ranks = mesh.global_ranks("pp")
    listings: list[list] = [[] for _ in ranks]
    listing = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()]
    dist.all_gather_object(listings, listing, group=group)
    found = dict(held)
    for sender, listing in enumerate(listings[1:], start=1):
        for name, shape, dtype in listing:
            if stage == sender:
                dist.send(held[name].contiguous(), ranks[0], group=group)
            elif stage == 0:
                received = torch.empty(shape, dtype=dtype, device=mesh.device)
                dist.recv(received, ranks[sender], group=group)
                found.setdefault(name, received)
    return found if stage == 0 else {}
