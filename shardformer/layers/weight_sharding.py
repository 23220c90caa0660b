"""Linear layers that hold a shard of their weight and gather it for each use (wp_size).

The weight parallelism of InternEvo (arXiv:2401.09149, section 3.3). The weight of the next layer is gathered while one
computes, and freed after use; the mean of a gradient travels while the layer before computes its own.

[Note: order of transfers] All ranks of the group use the same layers in the same order, forward and backward, so they
begin the same transfers in the same order: a prefetch depends on previous uses alone. On CUDA nothing waits on the
host. A transfer begins behind what the current stream was given, and the stream waits for it where its result is used;
so a buffer may be lent again as soon as its last use was given to the stream.
"""

# B batch, S sequence, N all of them together, I input features, O output features

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ...cluster.buffers import BufferPool
from ...cluster.collectives import Handle, InFlight, begin_all_gather, begin_reduce_scatter
from ...cluster.placement import Shard, place, placement_of
from ...pipeline.weight_gradients import DeferredGradient, WeightGradients
from .parallel_module import ParallelModule, require_native
from .weight_gradient import LaterProduct, weight_gradient

KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
# The means of gradients that may be in flight: that of a layer while the next one computes its own.
_MAX_MEANS = 2


class ShardedLinear(ParallelModule):
    """A linear layer whose weight is sharded over ranks, each with inputs of its own.

    The weight is gathered for each use, in forward and again for the input's gradient in backward. Its gradient is
    reduce-scattered: this rank's shard gets the mean over the group. A bias stays replicated, with the gradient of this
    rank's inputs. Every rank of the group runs the same such layers, in the same order and equally often.

    Args:
        native: an nn.Linear, which holds (O, I), or a transformers Conv1D, which holds (I, O).
        process_group: the weight axis.
        native_class: the class of `native`, where it is one of its own that computes what nn.Linear does.
        pool: gathers for all layers of the group; None is one of its own, which prefetches nothing.
    """

    weight_gradients: WeightGradients | None = None  # the queue of a schedule that defers them

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
        pool: "WeightPool | None" = None,
    ) -> None:
        require_native(native, *KINDS if native_class is None else (native_class,))
        super().__init__()
        self.is_transposed = isinstance(native, Conv1D)
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        self.bias: Parameter | None = native.bias  # type: ignore[assignment]
        self.in_features, self.out_features = _features(native)  # a tied weight may be cut already
        size, rows = process_group.size(), self.in_features if self.is_transposed else self.out_features
        # The dimension that comes first in memory: the shards end to end are the whole.
        shard = Shard(size=size, dim=0, blocks=(rows,), padded=(-(-rows // size) * size,), axis="weight")
        place(self.weight, shard, process_group.rank())
        self.pool = WeightPool(process_group) if pool is None else pool
        self.pool.buffers.reserve(self.weight.numel() * size)
        self.train(native.training)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I) in, (B, S, O) out, of this rank's batch. One all-gather.

        Raises:
            RuntimeError: under autocast, whose products are of other formats than the weight that is gathered.
        """
        if not x_BSI.is_meta and torch.is_autocast_enabled(x_BSI.device.type):  # meta has no autocast
            raise RuntimeError(
                "a weight-parallel layer computes in the format of its weight and was called under torch.autocast: "
                "leave autocast out and give the plugin precision='bf16' or 'fp16'"
            )
        if x_BSI.is_meta:  # a stage calls it for the shape of what another stage computes
            return x_BSI.new_empty(*x_BSI.shape[:-1], self.out_features)
        later = self.pool.later_gradient(self)
        weight = self.weight if later is None else later.weight
        out: Tensor = _GatheredLinear.apply(x_BSI, weight, self.bias, self, later)
        return out

    def extra_repr(self) -> str:
        """As of other parallel layers."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"piece={tuple(self.weight.shape)}, ranks={self.pool.group.size()}"
        )


def _features(native: nn.Module) -> tuple[int, int]:
    """The numbers of features that go in and come out."""
    if isinstance(native, Conv1D):
        return native.nx, native.nf
    assert isinstance(native, nn.Linear)
    return native.in_features, native.out_features


class _GatheredLinear(Function):
    """The products are those of a plain linear layer; of the weight only the shard is kept in between."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        bias: Tensor | None,
        layer: ShardedLinear,
        later: LaterProduct | None,
    ) -> Tensor:
        # The shard for autograd's own check alone, that nobody writes to it before backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, shard)
        ctx.shape, ctx.layer, ctx.later = x.shape, layer, later
        with layer.pool.whole(layer, for_backward=False) as weight:
            out = linear(x, weight.T if layer.is_transposed else weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape)  # or what follows could not write to it in place

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, _ = ctx.saved_tensors
        layer: ShardedLinear = ctx.layer
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        mean: InFlight[Tensor] | None = None
        of_input = of_weight = None
        if needs_input:
            with layer.pool.whole(layer, for_backward=True) as weight:
                mean = _begin_mean(layer, x, gradient_NO) if needs_weight else None  # travels meanwhile
                of_input = gradient_NO.mm(weight.T if layer.is_transposed else weight).view(ctx.shape)
        elif needs_weight:
            mean = _begin_mean(layer, x, gradient_NO)
        of_bias = gradient_NO.sum(0) if needs_bias else None
        if mean is not None and ctx.later is not None:
            begun = mean
            ctx.later.put(DeferredGradient(layer.weight, lambda: begun, torch._C._current_graph_task_id()))
        elif mean is not None:
            of_weight = mean.wait()
        return of_input, of_weight, of_bias, None, None


def _begin_mean(layer: ShardedLinear, x: Tensor, gradient_NO: Tensor) -> InFlight[Tensor] | None:
    """Begin to average a layer's gradient; None where the schedule defers it."""
    x_NI = x.reshape(-1, x.shape[-1])

    def begin() -> InFlight[Tensor]:
        gradient = weight_gradient(x_NI, gradient_NO, is_transposed=layer.is_transposed)
        return layer.pool.begin_mean(gradient)

    deferred = DeferredGradient(layer.weight, begin, torch._C._current_graph_task_id())
    if layer.weight_gradients is not None and layer.weight_gradients.defer(deferred):
        return None
    return begin()


class Use(NamedTuple):
    """A use of a layer's weight: "forward", "again" (recomputed) or "backward"."""

    kind: str
    layer: Any


class PrefetchOrder:
    """Prefetch order recorded from previous iterations: the use that has always followed another in the same pass.

    A forward and a backward are passes; nothing is prefetched beyond their ends. What was prefetched wrongly once never
    is again, so that a model whose path changes costs no more than that. Equal uses in an equal order prefetch the same
    on every rank.
    """

    def __init__(self) -> None:
        self._after: dict[Use, Use | None] = {}
        self._last: Use | None = None

    def after(self, use: Use) -> Use | None:
        """The use that will follow; None where that is not known."""
        return self._after.get(use)

    def note(self, use: Use) -> None:
        """Record a use."""
        if self._last is not None:
            is_one_pass = (use.kind == "forward") == (self._last.kind == "forward")
            follows = use if is_one_pass else None
            if self._after.setdefault(self._last, follows) != follows:
                self._after[self._last] = None
        self._last = use


@dataclass(kw_only=True, eq=False)
class _Transfer:
    """A weight that is gathered into a buffer, or a mean of gradients that leaves one.

    Args:
        buffer: lent by the pool.
        result: the whole weight without padding, or this rank's shard of the mean.
        handle: of the communication; None once it has ended.
        layer, state: of a weight, and its shard's state when it was sent.
    """

    buffer: Tensor
    result: Tensor
    handle: Handle | None
    layer: ShardedLinear | None = None
    state: tuple[int, int] | None = None

    def wait(self) -> None:
        """Have the result."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None


class WeightPool:
    """Gathers the weights of the layers of one weight axis, and averages their gradients.

    Args:
        group: the weight axis.
        overlap: prefetch the weight of the next layer while one computes, and let a gradient's mean travel while the
            layer before computes its own; without it every layer waits for both.
        memory_pool: keep buffers and use them again; two for weights and two for gradients are enough.
        gradient_dtype: the format in which gradients are averaged.

    Attributes:
        buffers: memory of whole weights and gradients.
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
        self.buffers = BufferPool(reuse=memory_pool)
        self._overlap = overlap
        self._gradient_dtype = gradient_dtype
        self._order = PrefetchOrder()
        self._prefetched: _Transfer | None = None
        self._means: deque[_Transfer] = deque()
        self._later: tuple[tuple[Any, ...] | None, LaterProduct | None] = (
            None,
            None,
        )  # of which layer, in which state

    @contextmanager
    def whole(self, layer: ShardedLinear, *, for_backward: bool) -> Iterator[Tensor]:
        """The whole weight of a layer, for a computation that is given to the current stream inside.

        One all-gather, of this weight or of the next. Every rank of the group calls it.

        Args:
            layer: of the weight.
            for_backward: whether it is for the layer's backward; its forward may run in a backward too (recomputed).
        """
        use = _use(layer, for_backward)
        self._order.note(use)
        gathering = self._taken(layer)
        following = self._order.after(use) if self._overlap else None
        if following is not None and following.layer is not layer:
            self._prefetched = self._begin(following.layer)
        try:
            yield gathering.result
        finally:
            if following is not None and following.layer is layer:
                self._prefetched = gathering
            else:
                self.buffers.give_back(gathering.buffer)

    def begin_mean(self, gradient: Tensor) -> InFlight[Tensor]:
        """Begin to average a weight's gradient over the group: this rank's shard.

        The mean of this shard over all ranks of the data axis that hold it is the mean over all of that axis. One
        reduce-scatter. Every rank of the group calls it.

        Args:
            gradient: (rows, …), whole, of this rank's batch.
        """
        while len(self._means) >= _MAX_MEANS:
            self._finish(self._means[0])
        size, rows = self.group.size(), gradient.shape[0]
        local_rows = -(-rows // size)
        shard = gradient.new_empty((local_rows, *gradient.shape[1:]), dtype=self._gradient_dtype)
        buffer = self.buffers.take(shard.numel() * size, shard.dtype, shard.device)
        padded = buffer.view(local_rows * size, *gradient.shape[1:])
        padded[:rows].copy_(gradient).mul_(1 / size)  # in the format of the mean, which may be the wider one
        padded[rows:].zero_()
        handle = begin_reduce_scatter(shard.view(-1), buffer, self.group)
        mean = _Transfer(buffer=buffer, result=shard, handle=handle)
        self._means.append(mean)

        def finish(shard: Tensor) -> Tensor:
            self._finish(mean)
            return shard

        return InFlight(None, shard, finish)

    def later_gradient(self, layer: ShardedLinear) -> LaterProduct | None:
        """Where a layer's gradient may wait until the backward of the layer before it is done; None for nowhere.

        Called in each forward, before the layer's own node of the graph is made; prepares the same for the next.
        """
        key, made = self._later
        self._later = None, None
        following = self._order.after(_use(layer, for_backward=False))
        if self._overlap and following is not None and torch.is_grad_enabled() and not _in_backward():
            weight = following.layer.weight
            if weight.requires_grad and weight.is_leaf:
                self._later = (following.layer, *_state(weight)), LaterProduct(weight)
        return made if key == (layer, *_state(layer.weight)) else None

    def _taken(self, layer: ShardedLinear) -> _Transfer:
        """The weight of a layer, there: the prefetched one, if it is that and still the same."""
        found, self._prefetched = self._prefetched, None
        if found is not None and (found.layer is not layer or found.state != _state(layer.weight)):
            found.wait()
            self.buffers.give_back(found.buffer)
            found = None
        found = found or self._begin(layer)
        found.wait()
        return found

    def _begin(self, layer: ShardedLinear) -> _Transfer:
        shard, placement = layer.weight.detach(), placement_of(layer.weight)
        assert isinstance(placement, Shard)
        shape = (shard.shape[0] * placement.size, *shard.shape[1:])
        buffer = self.buffers.take(prod(shape), shard.dtype, shard.device)
        return _Transfer(
            buffer=buffer,
            result=buffer.view(shape)[: placement.blocks[0]],
            handle=begin_all_gather(buffer, shard.reshape(-1), self.group),
            layer=layer,
            state=_state(layer.weight),
        )

    def _finish(self, mean: _Transfer) -> None:
        """Have a mean. Once more does nothing."""
        if mean in self._means:
            self._means.remove(mean)
            mean.wait()
            self.buffers.give_back(mean.buffer)


def _use(layer: ShardedLinear, for_backward: bool) -> Use:
    return Use("backward" if for_backward else "again" if _in_backward() else "forward", layer)


def _in_backward() -> bool:
    """Return True while autograd computes gradients."""
    return bool(torch._C._current_graph_task_id() != -1)


def _state(weight: Parameter) -> tuple[int, int]:
    """Changes whenever the parameter is written to or moved."""
    return weight.data_ptr(), weight._version
