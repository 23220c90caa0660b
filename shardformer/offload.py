"""Offload of the inputs of recomputed layers to host memory, until their backward.

[Note: activation offload] On CUDA copies run on a separate stream, overlapped with computation: an input is copied to
the host while its layer computes, and back during the backward of the following layer. So a rank keeps few inputs on
the device, for any number of layers and microbatches in flight. The source and destination of a copy are kept alive
until the compute stream has waited for the copy. With `Tensor.record_stream` memory would be freed only after the host
has seen the end of a copy, and the peak would depend on how far the host runs ahead.

A host buffer is reused as soon as no saved tensor needs it: the next copy into it follows the copies out of it in the
same stream. Buffers that have become too small are kept until none is in use, at the end of a step: unpinning memory
waits for the device, and inside a step a receive of the pipeline may be posted there whose sender waits for this rank.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..cluster.device import CopyStream, host_memory
from .recompute import RECOMPUTE
from .sequence.before_layers import ShardTensor

_MAX_BEING_OFFLOADED = 2  # a layer reads its input while the previous input is copied


@dataclass(frozen=True, eq=False)
class _Offloaded:
    """A saved tensor in host memory.

    Args:
        host_copy: its values, in a host buffer.
        previous: returns the one offloaded before it, which backward needs next; None if there is none.
    """

    host_copy: Tensor
    previous: Callable[[], "_Offloaded | None"]


class _HostBuffers:
    """Pool of host buffers: at most as many as were in use at once, each of a size that was requested.

    Args:
        device: the device of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # flat bytes, sorted by size
        self._outgrown: list[Tensor] = []  # replaced by larger ones, not released yet
        self._num_used = 0

    def take(self, nbytes: int) -> Tensor:
        """Take the smallest free buffer of at least this size out of the pool; if none is, allocate one.

        The new one replaces the largest free buffer, which is released when no buffer is in use.
        """
        self._num_used += 1
        index = bisect_left(self._free, nbytes, key=_size)
        if index < len(self._free):
            return self._free.pop(index)
        if self._free:
            self._outgrown.append(self._free.pop())
        return host_memory(nbytes, self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        insort(self._free, buffer, key=_size)
        self._num_used -= 1
        if not self._num_used:
            self._outgrown.clear()


def _size(buffer: Tensor) -> int:
    """Return the size of a buffer in bytes."""
    return buffer.nbytes


def _view_like(buffer: Tensor, saved: Tensor) -> Tensor:
    """Return the start of a buffer as a tensor with the shape, dtype and strides of another."""
    layout = torch.empty_like(saved, device="meta")
    return buffer[: layout.nbytes].view(saved.dtype).as_strided(layout.shape, layout.stride())


class ActivationOffload:
    """Keep the inputs of recomputed layers in host memory; see [Note: activation offload].

    Args:
        device: where the layers compute. On a CPU the copies are made too, synchronously.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = CopyStream(device)
        self._buffers = _HostBuffers(device)
        self._last: Callable[[], _Offloaded | None] = lambda: None  # a weak reference to the last one
        # Tensors whose copy to the host may not be complete, each with the event of the copy; the oldest first.
        self._being_offloaded: deque[tuple[Tensor, Any]] = deque()
        self._prefetch: tuple[_Offloaded, Tensor, Any] | None = None  # in flight: see `_begin_fetch`

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with recomputation in backward, and offload the hidden states that autograd saves for it.

        These are its first floating-point argument, and all saved tensors of the same shape and format.
        """
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if hidden is None or isinstance(hidden, ShardTensor):  # a ShardTensor has no memory of its own
            return RECOMPUTE(function, *args)
        shape_and_dtype = hidden.shape, hidden.dtype

        def pack(saved: Tensor) -> Tensor | _Offloaded:
            return self._offload(saved) if (saved.shape, saved.dtype) == shape_and_dtype else saved

        with saved_tensors_hooks(pack, self._fetch):
            return RECOMPUTE(function, *args)

    def _offload(self, saved: Tensor) -> _Offloaded:
        """Begin to copy a saved tensor to the host; its memory on the device is kept until the copy is complete."""
        while len(self._being_offloaded) >= _MAX_BEING_OFFLOADED:
            self._release_oldest()
        buffer = self._buffers.take(saved.nbytes)
        host_copy = _view_like(buffer, saved)
        with self._stream.behind():
            host_copy.copy_(saved, non_blocking=True)
            self._being_offloaded.append((saved, self._stream.event()))
        offloaded = _Offloaded(host_copy, self._last)
        # The buffer returns to the pool when autograd releases the saved tensor.
        finalize(offloaded, self._buffers.give_back, buffer).atexit = False
        self._last = ref(offloaded)  # the next one links to it, by which backward prefetches
        return offloaded

    def _fetch(self, saved: Tensor | _Offloaded) -> Tensor:
        """Return a saved tensor on the device, and begin to fetch the one that was offloaded before it."""
        if isinstance(saved, Tensor):
            return saved
        while self._being_offloaded:
            self._release_oldest()
        fetched, self._prefetch = self._prefetch, None
        if fetched is not None:  # a wrong prefetch is waited for too, since its memory is freed here
            _, _, event = fetched
            self._stream.wait(event)
        if fetched is None or fetched[0] is not saved:
            fetched = self._begin_fetch(saved)
            _, _, event = fetched
            self._stream.wait(event)
        if (previous := saved.previous()) is not None:
            self._prefetch = self._begin_fetch(previous)
        _, tensor, _ = fetched
        return tensor

    def _release_oldest(self) -> None:
        """Release the device memory of the tensor offloaded first, after waiting for its copy on the compute stream."""
        tensor, event = self._being_offloaded.popleft()
        self._stream.wait(event)
        del tensor  # not before the wait

    def _begin_fetch(self, offloaded: _Offloaded) -> tuple[_Offloaded, Tensor, Any]:
        """Begin to copy a tensor back to the device; return it, the tensor there and the event of the copy."""
        tensor = torch.empty_like(offloaded.host_copy, device=self._device)
        with self._stream.behind():
            tensor.copy_(offloaded.host_copy, non_blocking=True)
            return offloaded, tensor, self._stream.event()
