"""Whole weights of weight-parallel layers, gathered ahead of use and freed after it; means of their gradients.

[Note: transfers of weights] All ranks of the group use the same layers in the same order, forward and backward, so they
begin the same transfers in the same order: what is begun ahead depends on the uses before alone (use_order.py). On
CUDA nothing waits on the host. A transfer begins behind what the current stream was given, and the stream waits for
it where its result is used; so a buffer may be lent again as soon as its last use was given to the stream.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ...cluster.collectives import Handle, begin_all_gather, begin_reduce_scatter
from ...cluster.placement import Shard, placement_of
from .use_order import Use, UseOrder
from .weight_gradient import LaterProduct

# The means of gradients that may be on their way: that of a layer while the next one computes its own.
_MAX_MEANS = 2


class HoldsShard(Protocol):
    """A layer that holds a piece of its weight, cut along dim 0."""

    weight: Parameter


class Buffers:
    """Flat memory, lent and given back.

    Args:
        reuse: keep what is given back, to be lent again; without it every loan is new memory.

    Attributes:
        made: how many were made.
        lent: how many are lent now.
    """

    def __init__(self, *, reuse: bool) -> None:
        self.made = 0
        self.lent = 0
        self._reuse = reuse
        self._length = 0
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def expect(self, length: int) -> None:
        """Somebody will borrow so many elements."""
        self._length = max(self._length, length)

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many elements or more, of any value."""
        self.lent += 1
        if free := self._free.get((dtype, device)):
            return free.pop()
        self.made += 1
        with torch.inference_mode(False):  # it is lent in training too
            return torch.empty(
                max(length, self._length) if self._reuse else length, dtype=dtype, device=device
            )

    def give_back(self, buffer: Tensor) -> None:
        """The borrower will not use it any more, but for what is in the current stream already."""
        self.lent -= 1
        if self._reuse:
            self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)


@dataclass(kw_only=True, eq=False)
class _Gathering:
    """A whole weight, there or on its way.

    Args:
        layer: whose.
        state: what its piece was when it was sent.
        buffer: where the whole arrives.
        whole: the view of it in the weight's shape, without padding.
        work: what to wait for; None once it is there.
    """

    layer: HoldsShard
    state: tuple[int, int]
    buffer: Tensor
    whole: Tensor
    work: Handle | None

    def wait(self) -> None:
        """Have it."""
        if self.work is not None:
            self.work.wait()
            self.work = None


@dataclass(kw_only=True, eq=False)
class _Mean:
    """This rank's piece of a mean gradient, there or on its way.

    Args:
        buffer: what this rank adds.
        piece: where the piece arrives.
        work: what to wait for.
    """

    buffer: Tensor
    piece: Tensor
    work: Handle


class WeightPool:
    """Gathers the weights of the layers of one weight-parallel group, and averages their gradients.

    Args:
        group: the weight axis.
        overlap: gather the weight of the layer that will follow while one computes, and let a gradient's mean travel
            while the layer before computes its own; without it every layer waits for both.
        memory_pool: keep buffers and use them again; two for weights and two for gradients are enough.
        gradient_dtype: the format in which gradients are averaged.

    Attributes:
        group: the weight axis.
        buffers: where whole weights and gradients lie.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        overlap: bool = True,
        memory_pool: bool = True,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.group = group
        self.buffers = Buffers(reuse=memory_pool)
        self._overlap = overlap
        self._gradient_dtype = gradient_dtype
        self._order: UseOrder[HoldsShard] = UseOrder()
        self._ahead: _Gathering | None = None
        self._means: deque[_Mean] = deque()
        self._later: tuple[HoldsShard, LaterProduct] | None = None

    def add(self, layer: HoldsShard) -> None:
        """A layer that will be used."""
        self.buffers.expect(layer.weight.numel() * self.group.size())

    @contextmanager
    def whole(self, layer: HoldsShard, *, for_backward: bool) -> Iterator[Tensor]:
        """The whole weight of a layer, for a computation that is given to the current stream inside.

        One all-gather, of this weight or of the one that will follow. Every rank of the group calls it.

        Args:
            layer: whose.
            for_backward: whether it is for the layer's backward; its forward may run in a backward too (recomputed).
        """
        use = _use(layer, for_backward)
        self._order.note(use, in_backward=_in_backward())
        gathering = self._taken(layer)
        following = self._order.after(use) if self._overlap else None
        if following is not None and following.thing is not layer:
            self._ahead = self._begin(following.thing)
        try:
            yield gathering.whole
        finally:
            if following is not None and following.thing is layer:
                self._ahead = gathering
            else:
                self.buffers.give_back(gathering.buffer)

    def begin_mean(self, layer: HoldsShard, gradient: Tensor) -> Callable[[], Tensor]:
        """Begin to average a weight's gradient over the group; what is returned ends it and gives this rank's piece.

        The mean of this piece over all ranks of the data axis that hold it is the mean over all of that axis. One
        reduce-scatter. Every rank of the group calls it.

        Args:
            layer: whose.
            gradient: (rows, …), whole, of this rank's batch.
        """
        while len(self._means) >= _MAX_MEANS:
            self._finish(self._means[0])
        size = self.group.size()
        rows, local_rows = gradient.shape[0], -(-gradient.shape[0] // size)
        piece = gradient.new_empty((local_rows, *gradient.shape[1:]), dtype=self._gradient_dtype)
        buffer = self.buffers.take(piece.numel() * size, piece.dtype, piece.device)
        flat = buffer[: piece.numel() * size]
        padded = flat.view(local_rows * size, *gradient.shape[1:])
        padded[:rows].copy_(gradient).mul_(1 / size)  # in the format of the mean, which may be the wider one
        padded[rows:].zero_()
        mean = _Mean(buffer=buffer, piece=piece, work=begin_reduce_scatter(piece.view(-1), flat, self.group))
        self._means.append(mean)

        def end() -> Tensor:
            self._finish(mean)
            return mean.piece

        return end

    def later_gradient(self, layer: HoldsShard) -> LaterProduct | None:
        """Where a layer's gradient may wait until the backward of the layer before it is done; None for nowhere.

        Called in each forward, before the layer's own node of the graph is made; prepares the same for the next.
        """
        made, self._later = self._later, None
        following = self._order.after(_use(layer, for_backward=False))
        if self._overlap and following is not None and torch.is_grad_enabled() and not _in_backward():
            weight = following.thing.weight
            if weight.requires_grad and weight.is_leaf:
                self._later = following.thing, LaterProduct(weight)
        return made[1] if made is not None and made[0] is layer else None

    def _taken(self, layer: HoldsShard) -> _Gathering:
        """The weight of a layer, there: what was begun ahead, if it is that and still the same."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.layer is not layer or ahead.state != _state(layer.weight)):
            ahead.wait()
            self.buffers.give_back(ahead.buffer)
            ahead = None
        gathering = ahead or self._begin(layer)
        gathering.wait()
        return gathering

    def _begin(self, layer: HoldsShard) -> _Gathering:
        piece, placement = layer.weight.detach(), placement_of(layer.weight)
        assert isinstance(placement, Shard)
        shape = (piece.shape[0] * placement.size, *piece.shape[1:])
        buffer = self.buffers.take(prod(shape), piece.dtype, piece.device)
        flat = buffer[: prod(shape)]
        return _Gathering(
            layer=layer,
            state=_state(layer.weight),
            buffer=buffer,
            whole=flat.view(shape)[: placement.blocks[0]],
            work=begin_all_gather(flat, piece.reshape(-1), self.group),
        )

    def _finish(self, mean: _Mean) -> None:
        """Have a mean. Once more does nothing."""
        if mean in self._means:
            self._means.remove(mean)
            mean.work.wait()
            self.buffers.give_back(mean.buffer)


def _use(layer: HoldsShard, for_backward: bool) -> Use[HoldsShard]:
    kind = "backward" if for_backward else "again" if _in_backward() else "forward"
    return Use(kind, layer)


def _in_backward() -> bool:
    """Whether autograd is computing gradients now."""
    return bool(torch._C._current_graph_task_id() != -1)


def _state(weight: Parameter) -> tuple[int, int]:
    """Changes whenever the parameter is written to or moved."""
    return weight.data_ptr(), weight._version
