"""Memory that buckets borrow for whole gradients, one after the other. When, is bucket.py."""

import torch
from torch import Tensor

from ..cluster.large_pages import large_pages


class Loans:
    """Float32 buffers as long as the largest bucket, made when they are first needed and used again.

    A backward needs two of them: the averages of one bucket are on their way while the next gets its gradients.
    """

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}  # by address
        self._free: list[Tensor] = []
        self._length = 0
        self._device = torch.device("cpu")

    def expect(self, length: int, device: torch.device) -> None:
        """Somebody will borrow so many elements; called before the first loan."""
        self._length = max(self._length, length)
        self._device = device

    def take(self, length: int) -> Tensor:
        """So many elements, of any value."""
        if not self._free:
            made = large_pages(torch.empty(self._length, dtype=torch.float32, device=self._device))
            self._made[made.data_ptr()] = made
            self._free.append(made)
        return self._free.pop()[:length]

    def give_back(self, lent: Tensor) -> None:
        """The borrower will not use it any more, but for what is in the current stream already."""
        self._free.append(self._made[lent.data_ptr()])

    @property
    def nbytes(self) -> int:
        """The memory of all buffers."""
        return sum(made.nbytes for made in self._made.values())
