"""The axis over which a model's sequences are spread, and the sequence that it computes now."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.collectives import begin_gather
from .order import SequenceOrder
from .rings import DoubleRing

_ATTRIBUTE = "_echelon_sequence_axis"


class SequenceAxis:
    """The ranks over which the sequences of one stack of layers are spread.

    Args:
        group: the ranks.
        order: which positions each of them holds.
        rings: those of a double ring, for ring attention.

    Attributes:
        length: of the sequence that is being computed, without padding; 0 before the first.
        ends_whole: whether the last layer puts it together.
    """

    def __init__(
        self, group: dist.ProcessGroup, order: SequenceOrder, rings: DoubleRing | None = None
    ) -> None:
        if order.size != group.size():
            raise AssertionError(f"an order for {order.size} ranks and a group of {group.size()}")
        self.group, self.order, self.rings, self.length = group, order, rings, 0
        self.ends_whole = True

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    @property
    def part_length(self) -> int:
        """The length of a rank's part of the sequence that is being computed, with padding."""
        return self.order.padded(self.length) // self.order.size

    def own(self, x: Tensor, dim: int, *, padding: int = 0) -> Tensor:
        """This rank's part of a whole sequence."""
        return self.order.own(x, dim, self.rank, padding=padding)

    def gathered(self, part: Tensor, dim: int, length: int) -> Tensor:
        """The whole sequence of this length, contiguous, from the parts of all ranks. One all-gather; no gradient."""
        parts = begin_gather(part, self.group)()
        return self.order.whole(parts.unbind(0), dim, length).contiguous()

    @contextmanager
    def computing(self, length: int) -> Iterator[None]:
        """Inside, sequences are of this length: for what is computed again in backward."""
        before, self.length = self.length, length
        try:
            yield
        finally:
            self.length = before

    def note(self, module: nn.Module) -> None:
        """Let `axis_of` know of a layer, and of all that is in it, that it computes on a part of the sequence."""
        for each in module.modules():
            setattr(each, _ATTRIBUTE, self)


def axis_of(module: Any) -> SequenceAxis | None:
    """The axis over which a module's sequences are spread, None where it sees whole ones."""
    return getattr(module, _ATTRIBUTE, None)
