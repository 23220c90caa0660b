"""A pool of flat buffers, so that a training step allocates nothing."""

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers, each as long as the longest reservation.

    On CUDA a buffer may be returned once its last use is enqueued on the current stream, since its next use
    is too.
    """

    def __init__(self) -> None:
        self._length = 0
        self._buffers: dict[int, Tensor] = {}  # all, by address
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # those not in use

    def reserve(self, length: int) -> None:
        """Make buffers at least `length` elements long; called before the first `take`."""
        self._length = max(self._length, length)

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take a buffer of `length` uninitialized elements from the pool, which allocates one if none is free."""
        if free := self._free.get((dtype, device)):
            return free.pop()[:length]
        with torch.inference_mode(False):  # buffers are used in training too
            buffer = torch.empty(max(length, self._length), dtype=dtype, device=device)
        self._buffers[buffer.data_ptr()] = buffer
        return buffer[:length]

    def give_back(self, lent: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.setdefault((lent.dtype, lent.device), []).append(self._buffers[lent.data_ptr()])

    @property
    def nbytes(self) -> int:
        """The memory of all buffers of the pool, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
