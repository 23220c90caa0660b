"""Which of a rank's queries meet which keys of another rank, as far as they see any."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..layers.sequence_axis import SequenceOrder
from .block_mask import Mask, Seen


class Piece(NamedTuple):
    """Some queries of one rank and some keys of another.

    Attributes:
        rows, columns: where they lie in the parts of the two.
        queries, keys: their positions in the whole sequence.
        seen: what is seen, never nothing: see `Mask.block`.
        is_level: whether every score counts as 0, see `View`.
    """

    rows: slice
    columns: slice
    queries: range
    keys: range
    seen: Seen | Tensor
    is_level: bool = False


def pieces(
    mask: Mask, order: SequenceOrder, length: int, *, rank: int, source: int, size: int
) -> Iterator[Piece]:
    """The pieces of one rank's queries and another's keys. Padding behind the sequence is in none of them.

    Args:
        mask: what is seen.
        order: who holds what.
        length: of the sequence, without padding.
        rank: of the queries.
        source: of the keys.
        size: the largest number of queries, and of keys, of a piece.
    """
    for queries, row in _ranges(order, length, rank, size):
        for keys, column in _ranges(order, length, source, size):
            rows, columns = slice(row, row + len(queries)), slice(column, column + len(keys))
            seen = mask.block(queries, keys)
            if seen is not Seen.NOTHING:
                yield Piece(rows, columns, queries, keys, seen)
            levelled = mask.levelled(queries)
            if levelled is not None:
                yield Piece(rows, columns, queries, keys, levelled.unsqueeze(-1), is_level=True)


def _ranges(order: SequenceOrder, length: int, rank: int, size: int) -> Iterator[tuple[range, int]]:
    """Positions that a rank holds, side by side, and where in its part they begin."""
    offset = 0
    for stretch in order.stretches(rank, length):
        end = min(stretch.stop, length)
        for start in range(stretch.start, end, size):
            yield range(start, min(start + size, end)), offset + start - stretch.start
        offset += len(stretch)
