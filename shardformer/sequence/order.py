"""Which positions of a sequence each rank of an axis holds. What is done with them is axis.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """Equal parts of a sequence, padded at its end where it does not divide.

    Args:
        size: ranks of the axis.
        is_zigzag: rank r holds the stretches r and 2·size−1−r of 2·size equal ones, so that under a causal mask every
            rank has as much attention to compute (the load balancing of Llama 3, arXiv:2407.21783,
            section 3.3.2). Otherwise
            rank r holds the r-th of `size`.
    """

    size: int
    is_zigzag: bool = False

    def padded(self, length: int) -> int:
        """The length of a sequence with its padding."""
        return -(-length // self._num_stretches) * self._num_stretches

    def stretches(self, rank: int, length: int) -> tuple[range, ...]:
        """The positions that a rank holds, in its order; those from `length` on are padding."""
        width = self.padded(length) // self._num_stretches
        return tuple(range(width * each, width * (each + 1)) for each in self._held(rank))

    def own(self, x: Tensor, dim: int, rank: int, *, padding: int = 0) -> Tensor:
        """A rank's part of a whole sequence that lies along `dim`, contiguous."""
        dim %= x.ndim
        missing = self.padded(x.shape[dim]) - x.shape[dim]
        padded = pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing), value=padding) if missing else x
        pieces = padded.chunk(self._num_stretches, dim)
        return torch.cat([pieces[each] for each in self._held(rank)], dim).contiguous()

    def whole(self, parts: Sequence[Tensor], dim: int, length: int) -> Tensor:
        """The sequence from the parts of all ranks in their order, without its padding."""
        pieces: list[Tensor] = [parts[0]] * self._num_stretches
        for rank, part in enumerate(parts):
            for each, piece in zip(self._held(rank), part.chunk(len(self._held(rank)), dim), strict=True):
                pieces[each] = piece
        return torch.cat(pieces, dim).narrow(dim, 0, length)

    @property
    def _num_stretches(self) -> int:
        return 2 * self.size if self.is_zigzag else self.size

    def _held(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.size - 1 - rank) if self.is_zigzag else (rank,)
