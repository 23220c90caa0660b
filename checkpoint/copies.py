"""Memory for copies of what is saved beside training, kept from one save to the next. Who copies what is not here.

[Note: kept copies] Training waits while a copy is made, and memory that was written to before is copied to many times
as fast as new memory, whose pages the system has to find and clear first. Hence it is kept, in large pages, and pinned
where tensors come from a GPU.
"""

import torch
from torch import Tensor

from ..cluster.large_pages import large_pages

_CHUNK = 2**26
_ALIGNMENT = 64


class Copies:
    """Hands out memory for copies, all of which end together.

    Args:
        device: where the tensors are that are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._chunk, self._used = 0, 0

    @property
    def nbytes(self) -> int:
        """The memory that is kept."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def forget(self) -> None:
        """Make place for the next copies: nobody reads the ones so far any more."""
        self._chunk, self._used = 0, 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU, end to end in memory. From a GPU it is there after `finish`."""
        tensor = tensor.detach()
        memory = self._take(tensor.numel() * tensor.dtype.itemsize)
        copied = memory.view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, nbytes: int) -> Tensor:
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            if self._used + nbytes <= chunk.nbytes:
                start = self._used
                self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                return chunk[start : start + nbytes]
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(self._new(max(nbytes, _CHUNK)))
        return self._take(nbytes)

    def _new(self, nbytes: int) -> Tensor:
        is_pinned = self._device.type == "cuda"
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        return memory if is_pinned else large_pages(memory)
