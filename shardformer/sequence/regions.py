"""What regions do with sequences that are spread over the tensor axis. Which layers are regions is layer_split.py's.

Between regions each rank holds a part of the sequence, inside them all of it, of a part of the features. So what a
region begins with is gathered, and what it ends with is summed and scattered (arXiv:2205.05198, section 4.2.2).
"""

# B batch, S true sequence, s part of a rank, H hidden, T size of the group

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ...cluster.collectives import begin_gather, begin_sum_of_rows
from .axis import SequenceAxis

Style = Literal["gather", "regather", "ring"]


@dataclass(frozen=True)
class RegionSequence:
    """How the regions of a model go between parts of sequences and whole ones.

    Args:
        axis: over which the sequences are spread; the tensor axis, in stretches of one each.
        style: "gather" by one collective at each end of a region and in each direction; "regather" keeps a rank's part
            for backward instead of what was gathered, and gathers it again; "ring" in steps between products.
        overlap: in backward gather while gradients are computed.
    """

    axis: SequenceAxis
    style: Style = "gather"
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.axis.order.is_zigzag:
            raise AssertionError("regions gather sequences whose parts are of one stretch")

    def begin_whole(self, part_BsH: Tensor, length: int) -> Callable[[], Tensor]:
        """Begin to gather a sequence of this length; what is returned gives (B, S, H). One all-gather."""
        rows = begin_gather(part_BsH, self.axis.group)
        return lambda: rows().transpose(0, 1).flatten(1, 2)[:, :length].contiguous()

    def begin_own_sum(self, partial_BSH: Tensor) -> Callable[[], Tensor]:
        """Begin to sum over the ranks; what is returned gives this rank's part (B, s, H). One reduce-scatter."""
        return begin_sum_of_rows(self.rows(partial_BSH), self.axis.group)

    def rows(self, whole_BSH: Tensor) -> Tensor:
        """The parts of all ranks (T, B, s, H) of a whole sequence; padding is zeros."""
        order, length = self.axis.order, whole_BSH.shape[1]
        padded = pad(whole_BSH, (0, 0, 0, order.padded(length) - length))
        return padded.unflatten(1, (order.size, -1)).transpose(0, 1)

    def length_of(self, part_BsH: Tensor) -> int:
        """The length of the sequence that a part is of.

        Raises:
            ValueError: it is none of the sequence that is being computed.
        """
        if part_BsH.ndim != 3 or part_BsH.shape[1] != self.axis.part_length:
            raise ValueError(
                f"a layer's region is given {tuple(part_BsH.shape)}, where a rank's part of a sequence of "
                f"{self.axis.length} is (batch, {self.axis.part_length}, width): train this model without "
                "enable_sequence_parallelism"
            )
        return self.axis.length


def enter_beside(
    part_BsH: Tensor,
    sequence: RegionSequence,
    gather: Callable[[Tensor, int], Tensor],
    beside: Callable[[], None],
) -> Tensor:
    """Gather a region's input; backward sums and scatters, beside the backward of what `beside` computes.

    As `copy_beside` does with an all-reduce: of the nodes that are ready autograd runs the one that was made last.

    Args:
        part_BsH: this rank's part; or (B·s, H), and what is returned is (B·S, H).
        sequence: says of what.
        gather: makes the whole of a part and the length of the true sequence; called once, without autograd.
        beside: makes nodes whose backward waits for nothing of this one.

    Returns:
        (B, S, H), equal on all ranks; its gradient is a part of a sum on each.
    """
    if part_BsH.ndim == 2:  # the tokens of all samples in one row
        by_sample = part_BsH.unflatten(0, (-1, sequence.axis.part_length))
        return enter_beside(by_sample, sequence, gather, beside).flatten(0, 1)
    length = sequence.length_of(part_BsH)
    under_way: list[Callable[[], Tensor]] = []
    ended = _EndSum.apply(part_BsH, under_way)
    beside()
    whole_BSH: Tensor = _GatherBeginSum.apply(ended, sequence, lambda part: gather(part, length), under_way)
    return whole_BSH


def leave(partial_BSH: Tensor, sequence: RegionSequence) -> Tensor:
    """This rank's part (B, s, H) of the sum of what a region ends with, or (B·s, H) of (B·S, H); backward gathers."""
    if partial_BSH.ndim == 2:
        return leave(partial_BSH.unflatten(0, (-1, sequence.axis.length)), sequence).flatten(0, 1)
    part_BsH: Tensor = _SumScatter.apply(partial_BSH, sequence)
    return part_BsH


class _EndSum(Function):
    """The part of a region's entry whose backward waits for the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, under_way: list[Callable[[], Tensor]]) -> Tensor:
        ctx.under_way = under_way
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.under_way.pop()(), None


class _GatherBeginSum(Function):
    """The part of a region's entry that gathers, and whose backward begins the sum: it returns zeros for it."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        sequence: RegionSequence,
        gather: Callable[[Tensor], Tensor],
        under_way: list[Callable[[], Tensor]],
    ) -> Tensor:
        ctx.sequence, ctx.under_way, ctx.shape = sequence, under_way, part.shape
        return gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.under_way.append(ctx.sequence.begin_own_sum(gradient))
        return gradient.new_zeros(()).expand(ctx.shape), None, None, None


class _SumScatter(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, sequence: RegionSequence) -> Tensor:
        ctx.sequence, ctx.length = sequence, partial.shape[1]
        return sequence.begin_own_sum(partial)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.sequence.begin_whole(gradient, ctx.length)(), None
