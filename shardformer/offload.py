"""Offload of the inputs of recomputed layers to host memory, until their backward.

[Note: activation offload] On CUDA copies run on a separate stream, overlapped with computation: an input is copied to
the host while its layer computes, and back during the backward of the following layer. So a rank keeps few inputs on
the device, for any number of layers and microbatches in flight. The source and destination of a copy are kept alive
until the compute stream has waited for the copy. With `Tensor.record_stream` memory would be freed only after the host
has seen the end of a copy, and the peak would depend on how far the host runs ahead.

A host buffer is reused as soon as no saved tensor needs it: the next copy into it follows the copies out of it in the
same stream.
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
from .sequence.before_layers import PartTensor

_MOST_LEAVING = 2  # a layer reads its input while the previous input is copied


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A saved tensor in host memory, with a reference to the previous one, which is prefetched next."""

    on_host: Tensor
    before: Callable[[], "_Waiting | None"]


class _HostBuffers:
    """Pool of host buffers: at most as many as were in use at once, each of a size that was requested.

    Args:
        device: the device of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # by size

    def take(self, nbytes: int) -> Tensor:
        """Return the smallest free buffer that is large enough; if none is, a new one replaces the largest."""
        place = bisect_left(self._free, nbytes, key=_size)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self._free.pop()
        return host_memory(nbytes, self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        insort(self._free, buffer, key=_size)


def _size(buffer: Tensor) -> int:
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
        self._last: Callable[[], _Waiting | None] = lambda: None
        self._leaving: deque[tuple[Tensor, Any]] = deque()  # with the event of the copy
        self._arriving: tuple[_Waiting, Tensor, Any] | None = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with recomputation; its first floating tensor, and all saved ones like it, are offloaded."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if hidden is None or isinstance(hidden, PartTensor):  # a PartTensor has no memory of its own
            return RECOMPUTE(function, *args)
        kind = hidden.shape, hidden.dtype

        def pack(saved: Tensor) -> Tensor | _Waiting:
            return self._send(saved) if (saved.shape, saved.dtype) == kind else saved

        with saved_tensors_hooks(pack, self._take):
            return RECOMPUTE(function, *args)

    def _send(self, saved: Tensor) -> _Waiting:
        """Begin to copy a saved tensor to the host; its memory is kept until the copy is done."""
        while len(self._leaving) >= _MOST_LEAVING:
            self._let_go()
        buffer = self._buffers.take(saved.nbytes)
        on_host = _view_like(buffer, saved)
        with self._stream.behind():
            on_host.copy_(saved, non_blocking=True)
            self._leaving.append((saved, self._stream.event()))
        waiting = _Waiting(on_host, self._last)
        finalize(waiting, self._buffers.give_back, buffer).atexit = False
        self._last = ref(waiting)
        return waiting

    def _take(self, saved: Tensor | _Waiting) -> Tensor:
        """Return a saved tensor on the device, and begin to fetch the one that was sent before it."""
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:
            self._let_go()
        arriving, self._arriving = self._arriving, None
        if arriving is not None:  # also after a wrong prefetch, before its memory is freed
            _, _, event = arriving
            self._stream.wait(event)
        if arriving is None or arriving[0] is not saved:
            arriving = self._begin(saved)
            _, _, event = arriving
            self._stream.wait(event)
        if (before := saved.before()) is not None:
            self._arriving = self._begin(before)
        _, tensor, _ = arriving
        return tensor

    def _let_go(self) -> None:
        tensor, event = self._leaving.popleft()
        self._stream.wait(event)
        del tensor  # not before the wait

    def _begin(self, waiting: _Waiting) -> tuple[_Waiting, Tensor, Any]:
        tensor = torch.empty_like(waiting.on_host, device=self._device)
        with self._stream.behind():
            tensor.copy_(waiting.on_host, non_blocking=True)
            return waiting, tensor, self._stream.event()
