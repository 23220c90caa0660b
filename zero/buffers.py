"""A pool of flat buffers that are lent and given back, so that a step allocates nothing."""

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers as long as the longest that was reserved.

    On CUDA a buffer may be given back as soon as its last use is in the current stream: so is its next.
    """

    def __init__(self) -> None:
        self._length = 0
        self._made: dict[int, Tensor] = {}  # by address
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def reserve(self, length: int) -> None:
        """Make buffers at least so long; called before the first loan."""
        self._length = max(self._length, length)

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend so many elements, of any value."""
        if free := self._free.get((dtype, device)):
            return free.pop()[:length]
        with torch.inference_mode(False):  # it is lent in training too
            made = torch.empty(max(length, self._length), dtype=dtype, device=device)
        self._made[made.data_ptr()] = made
        return made[:length]

    def give_back(self, lent: Tensor) -> None:
        """Take back what was lent."""
        self._free.setdefault((lent.dtype, lent.device), []).append(self._made[lent.data_ptr()])

    @property
    def nbytes(self) -> int:
        """The memory of all buffers that are kept."""
        return sum(made.nbytes for made in self._made.values())
