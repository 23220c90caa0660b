"""Pass tensors around a ring of ranks, or around nested rings.

[Note: rings within a ring] Rings are listed from the outermost to the innermost; their product is all ranks. The place
of a rank is a mixed-radix number whose digits are its ranks in the rings, outermost first. While a tensor goes around
the innermost ring, its next step along the outer ring is already in flight. With an inner ring inside each node (the
double ring of LoongTrain, arXiv:2406.18485, section 4.4) the slower link between nodes has the time of a full inner
ring. Each rank sends every tensor as often as in a single ring.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .threads import ThreadGroup

Rings = Sequence[dist.ProcessGroup]

# Message tags, for the two kinds of messages between two ranks: visiting tensors, and results on their way back.
# gloo.py uses different tags.
_OUTWARD, _HOMEWARD = range(2**21, 2**21 + 2)


def circulate(x: Tensor, rings: Rings) -> Iterator[tuple[int, Tensor]]:
    """Yield the place and the tensor of each rank, this rank's first, with the next one in flight; no gradient.

    Args:
        x: this rank's tensor, contiguous and of one shape on all ranks; not changed.
        rings: see [Note: rings within a ring]. Every rank must iterate to the end.
    """
    ring, inner_rings = rings[0], rings[1:]
    inner_size = prod(inner_ring.size() for inner_ring in inner_rings)
    for step, visited in _steps(x, ring):
        place = (ring.rank() - step) % ring.size()
        if not inner_rings:
            yield place, visited
        else:
            for inner_place, inner_visited in circulate(visited, inner_rings):
                yield place * inner_size + inner_place, inner_visited


def round_trip(x: Tensor, rings: Rings, visit: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Send this rank's tensor past all ranks and sum what they compute from it; no gradient.

    Partial sums follow their tensor one step later, in flight while the next visit is computed.

    Args:
        x: this rank's tensor, contiguous and of one shape on all ranks; not changed.
        rings: see [Note: rings within a ring]; every rank must call.
        visit: called with a rank's place and tensor; returns a new contiguous tensor, of one shape on all ranks.
    """
    ring, inner_rings = rings[0], rings[1:]
    total: Tensor | None = None
    in_flight: Shift | None = None
    for step, visited in _steps(x, ring):
        place = (ring.rank() - step) % ring.size()
        result = _visit(place, visited, inner_rings, visit)
        if total is None:
            total = result  # of this rank's tensor: it stays here
            continue
        if in_flight is not None:
            result += in_flight.wait()
        in_flight = Shift(result, ring, tag=_HOMEWARD)
    assert total is not None
    return total if in_flight is None else total.add_(in_flight.wait())


def _visit(place: int, visited: Tensor, inner_rings: Rings, visit: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sum over the inner rings for the visiting tensor, or this rank's result if there are none."""
    if not inner_rings:
        return visit(place, visited)
    first = place * prod(inner_ring.size() for inner_ring in inner_rings)
    return round_trip(visited, inner_rings, lambda inner_place, tensor: visit(first + inner_place, tensor))


def _steps(x: Tensor, ring: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield the distance and tensor of each previous rank of the ring, nearest first."""
    for step in range(ring.size()):
        in_flight = Shift(x, ring, tag=_OUTWARD) if step + 1 < ring.size() else None
        yield step, x
        if in_flight is not None:
            x = in_flight.wait()


class Shift:
    """A tensor in flight to the next rank of a group, and that of the previous rank in flight to this one.

    The constructor starts the communication. Every rank must construct one, and wait.

    Args:
        x: contiguous, of one shape on all ranks; must not change until `wait` has returned.
        group: has two ranks or more.
        tag: distinguishes simultaneous shifts.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
        size, rank = group.size(), group.rank()
        self._sent, self._arriving = x, torch.empty_like(x)
        self._works: list[dist.Work]
        if isinstance(group, ThreadGroup):  # of which P2POp knows no ranks
            group.shift(self._arriving, x)
            self._works = []
            return
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, tag=tag, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._arriving, group=group, tag=tag, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """Return the received tensor; call it once. A CUDA stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._arriving
