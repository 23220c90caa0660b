"""Inputs of recomputed layers that wait for backward in host memory.

[Note: activation offload] On CUDA copies run on a stream of their own, beside the computation: an input leaves while
its layer computes, and comes back while the layer behind it is in backward. So a rank keeps few inputs on the device,
however many layers and microbatches are in flight. What a copy reads or writes is held until the stream of the
computation has waited for it. With `Tensor.record_stream` memory would be free once the host sees that a copy ended,
and the peak would depend on how far the host is ahead.

Host memory is lent again as soon as nothing waits in it: the copy that writes it next is behind those that read it, in
the same stream.
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

_MOST_LEAVING = 2  # one is read by its layer, while the one before it is copied


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A tensor in host memory, and the one that was saved before it, while that waits."""

    on_host: Tensor
    before: Callable[[], "_Waiting | None"]


class _HostBuffers:
    """Host memory that is lent and taken back: at most as many buffers as were lent at once, each as long as one lent.

    Args:
        device: from and to which it is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # by size

    def take(self, nbytes: int) -> Tensor:
        """Lend the smallest buffer that is large enough; where none is, a new one takes the place of the largest."""
        place = bisect_left(self._free, nbytes, key=_size)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self._free.pop()
        return host_memory(nbytes, self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Take back what was lent."""
        insort(self._free, buffer, key=_size)


def _size(buffer: Tensor) -> int:
    return buffer.nbytes


def _view_like(buffer: Tensor, saved: Tensor) -> Tensor:
    """The first bytes as a tensor with the shape, dtype and order of entries of another."""
    layout = torch.empty_like(saved, device="meta")
    return buffer[: layout.nbytes].view(saved.dtype).as_strided(layout.shape, layout.stride())


class ActivationOffload:
    """Keeps the inputs of recomputed layers in host memory; see [Note: activation offload].

    Args:
        device: where the layers compute. Of a CPU the copies are made too, at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = CopyStream(device)
        self._buffers = _HostBuffers(device)
        self._last: Callable[[], _Waiting | None] = lambda: None
        self._leaving: deque[tuple[Tensor, Any]] = deque()  # with what says that the copy is done
        self._arriving: tuple[_Waiting, Tensor, Any] | None = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function whose first tensor, and all like it, wait on the host until it is computed again."""
        hidden = next((each for each in args if isinstance(each, Tensor) and each.is_floating_point()), None)
        if hidden is None or isinstance(hidden, PartTensor):  # which has no memory to be copied
            return RECOMPUTE(function, *args)
        kind = hidden.shape, hidden.dtype

        def pack(saved: Tensor) -> Tensor | _Waiting:
            return self._send(saved) if (saved.shape, saved.dtype) == kind else saved

        with saved_tensors_hooks(pack, self._take):
            return RECOMPUTE(function, *args)

    def _send(self, saved: Tensor) -> _Waiting:
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
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:
            self._let_go()
        arriving, self._arriving = self._arriving, None
        if arriving is not None:  # also where another came than was expected, before its memory is free
            self._stream.wait(arriving[2])
        if arriving is None or arriving[0] is not saved:
            arriving = self._begin(saved)
            self._stream.wait(arriving[2])
        if (before := saved.before()) is not None:
            self._arriving = self._begin(before)
        return arriving[1]

    def _let_go(self) -> None:
        tensor, event = self._leaving.popleft()
        self._stream.wait(event)
        del tensor  # only now

    def _begin(self, waiting: _Waiting) -> tuple[_Waiting, Tensor, Any]:
        tensor = torch.empty_like(waiting.on_host, device=self._device)
        with self._stream.behind():
            tensor.copy_(waiting.on_host, non_blocking=True)
            return waiting, tensor, self._stream.event()
