"""The rings of a sequence axis, of which ring attention knows one or two. It is ring.py."""

from typing import NamedTuple

import torch.distributed as dist

from ...cluster.mesh import ParallelMesh


class DoubleRing(NamedTuple):
    """The ranks of a sequence axis as rings of equal size, and rings of those at the same place in them.

    Attributes:
        inner: this rank's ring of neighbours on the axis.
        outer: the ranks at its place in all inner rings.
    """

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup


def double_ring(mesh: ParallelMesh, inner_ring_size: int | None) -> DoubleRing | None:
    """The rings of axis sp, None where they come to a single one. Collective over the world.

    Args:
        mesh: whose axis.
        inner_ring_size: ranks of an inner ring, which divide those of the axis; None is a single ring.
    """
    size = mesh.size("sp")
    if inner_ring_size in (None, 1, size):
        return None
    assert inner_ring_size is not None
    if size % inner_ring_size:
        raise AssertionError(f"inner rings of {inner_ring_size} on {size} ranks")
    inner = mesh.subgroup(
        "sp", [range(each, each + inner_ring_size) for each in range(0, size, inner_ring_size)]
    )
    outer = mesh.subgroup("sp", [range(each, size, inner_ring_size) for each in range(inner_ring_size)])
    assert inner is not None and outer is not None
    return DoubleRing(inner, outer)
