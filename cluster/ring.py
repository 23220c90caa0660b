"""Tensors that travel round a ring of ranks, or round rings within a ring. What is done with them is the callers'.

[Note: rings within a ring] Rings are given from the outermost to the innermost one, and together they are all ranks: a
rank's place among all is its places in them as digits, the outermost first. A tensor goes round the innermost ring
while its next journey, one step along the ring outside of it, has begun: with an inner ring inside of each node (the
double ring of LoongTrain, arXiv:2406.18485, section 4.4) the slower wire between nodes has a whole inner ring's time.
Each rank sends every tensor as often as in a single ring.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

Rings = Sequence[dist.ProcessGroup]

# Kinds of messages that are in flight between two ranks at a time: what is visited, what visits bring home.
# Those of gloo.py are others.
_OUTWARD, _HOMEWARD = range(2**21, 2**21 + 2)


def travel(x: Tensor, rings: Rings) -> Iterator[tuple[int, Tensor]]:
    """Each rank's tensor and its place among all ranks, this one's first, the next in flight meanwhile; no gradient.

    Args:
        x: this rank's, contiguous and of one shape on all ranks; it stays as it is.
        rings: see [Note: rings within a ring]. Every rank must go through to the end.
    """
    ring, within = rings[0], rings[1:]
    for step, visited in _steps(x, ring):
        place = (ring.rank() - step) % ring.size()
        if not within:
            yield place, visited
        else:
            for inner_place, inner in travel(visited, within):
                yield place * prod(each.size() for each in within) + inner_place, inner


def round_trip(x: Tensor, rings: Rings, visit: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sum of what all ranks return for this rank's tensor, which travels as in `travel`; no gradient.

    What is brought home travels behind its tensor, one step later, and is in flight while the next visit is computed.

    Args:
        x: this rank's, contiguous and of one shape on all ranks; it stays as it is.
        rings: see [Note: rings within a ring]; every rank must call.
        visit: by a rank's place and its tensor, a new contiguous tensor, of one shape on all ranks.
    """
    ring, within = rings[0], rings[1:]
    own: Tensor | None = None
    in_flight: Shift | None = None
    for step, visited in _steps(x, ring):
        place = (ring.rank() - step) % ring.size()
        found = _visit(place, visited, within, visit)
        if own is None:
            own = found  # at home: this needs no journey
            continue
        if in_flight is not None:
            found += in_flight.wait()
        in_flight = Shift(found, ring, tag=_HOMEWARD)
    assert own is not None
    return own if in_flight is None else own.add_(in_flight.wait())


def _visit(place: int, visited: Tensor, within: Rings, visit: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The result of a whole inner ring for the tensor that this rank has there, or of this rank alone."""
    if not within:
        return visit(place, visited)
    first = place * prod(each.size() for each in within)
    return round_trip(visited, within, lambda inner_place, inner: visit(first + inner_place, inner))


def _steps(x: Tensor, ring: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """The tensors of the ranks so many steps before this one, in that order."""
    for step in range(ring.size()):
        in_flight = Shift(x, ring, tag=_OUTWARD) if step + 1 < ring.size() else None
        yield step, x
        if in_flight is not None:
            x = in_flight.wait()


class Shift:
    """A tensor on its way to the next rank of a group, and that of the rank before on its way here. Making it begins.

    Every rank must make one, and wait.

    Args:
        x: contiguous, of one shape on all ranks; it must stay as it is until `wait` has returned.
        group: of two ranks or more.
        tag: distinguishes shifts that are in flight at a time.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
        size, rank = group.size(), group.rank()
        self._sent, self._arriving = x, torch.empty_like(x)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, tag=tag, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._arriving, group=group, tag=tag, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """Return the tensor that arrived; called once. A CUDA stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._arriving
