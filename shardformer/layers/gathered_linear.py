"""Linear layers with a sharded weight that is all-gathered for each use (wp_size).

The weight parallelism of InternEvo (arXiv:2401.09149, section 3.3). The weight of the next layer is prefetched while
one computes, and freed after use. The average of a gradient is in flight while the previous layer computes its own.

[Note: order of transfers] All ranks of the group use the same layers in the same order, forward and backward, so they
begin the same collectives in the same order: a prefetch depends only on previous uses. On CUDA the host never waits.
A collective begins after the work already on the current stream, and the stream waits for it where its result is used.
So torch may reuse its memory as soon as its last use is enqueued on the stream.
"""

# B batch, S sequence, N all of them together, I input features, O output features

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn.functional import linear

from ...cluster.collectives import (
    InFlight,
    begin_all_gather,
    begin_reduce_scatter,
    once_differentiable,
    unchanged,
)
from ...cluster.placement import Shard, place, round_up
from ...cluster.transformers_api import Conv1D
from ...pipeline.weight_gradients import WeightGradient, WeightGradientQueue
from .deferred_linear import Crossing, Deferred, LaterProduct, enter_overlapped, weight_gradient
from .parallel_module import ParallelModule, require_native

# The weight itself enters, since the layer's input does not exist yet.
_ENTERS_UNCHANGED = Crossing(unchanged, partial(InFlight, None))
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)


class ShardedLinear(ParallelModule):
    """A linear layer whose weight is sharded over ranks with different inputs.

    The weight is all-gathered for each use, in forward and again for the input's gradient in backward. Its gradient is
    reduce-scattered: this rank's shard receives the mean over the group. A bias stays replicated, with the gradient of
    the local inputs. All ranks of the group must run the same layers, in the same order and equally often.

    Args:
        native: an nn.Linear, with a weight (O, I), or a transformers Conv1D, with a weight (I, O).
        process_group: the weight axis.
        native_class: the class of `native`, if it is a subclass that computes the same as the plain class.
        pool: gathers the weights of all layers of the group; None makes one for this layer, without prefetch.
    """

    weight_gradients: WeightGradientQueue | None = None  # the queue of a schedule that defers them

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
        self.in_features, self.out_features = _features(native)  # a tied weight may be sharded already
        size, rows = process_group.size(), self.in_features if self.is_transposed else self.out_features
        # The outermost dimension in memory: the concatenated shards are the full weight.
        shard = Shard(size=size, dim=0, blocks=(rows,), padded=(round_up(rows, size),), axis="wp")
        self.num_rows = rows
        place(self.weight, shard, process_group.rank())
        self.pool = WeightPool(process_group) if pool is None else pool
        self.train(native.training)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """Map (B, S, I) to (B, S, O), for the local batch. One all-gather.

        Raises:
            RuntimeError: autocast is enabled, which computes in another format than that of the gathered weight.
        """
        if not x_BSI.is_meta and torch.is_autocast_enabled(x_BSI.device.type):  # meta has no autocast
            raise RuntimeError(
                "a layer with sharded weights (wp_size > 1) was called under torch.autocast: leave autocast "
                "out and give the plugin precision='bf16' or 'fp16'"
            )
        if x_BSI.is_meta:  # a stage infers the shape of another stage's output
            return x_BSI.new_empty(*x_BSI.shape[:-1], self.out_features)
        later_product = self.pool.later_gradient(self)
        weight, later = later_product or (self.weight, None)
        out: Tensor = _GatheredLinear.apply(x_BSI, weight, self.bias, self, later)
        return out

    def extra_repr(self) -> str:
        """Describe the layer like other parallel layers."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"shard={tuple(self.weight.shape)}, ranks={self.pool.group.size()}"
        )


def _features(native: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features."""
    if isinstance(native, Conv1D):
        return native.nx, native.nf
    assert isinstance(native, nn.Linear)
    return native.in_features, native.out_features


class _GatheredLinear(Function):
    """The products of a plain linear layer; between forward and backward only the weight's shard is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        bias: Tensor | None,
        layer: ShardedLinear,
        later: Deferred | None,
    ) -> Tensor:
        """Multiply with the gathered weight, which is released afterwards.

        Args:
            x: (…, I), of the local batch.
            shard: this rank's shard of the weight.
            bias: (O), or None.
            layer: the layer of the weight.
            later: receives the gradient in flight in backward, see `LaterProduct`; None if backward waits for it.
        """
        # Save the shard, so that autograd detects writes to it before backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, shard)
        ctx.shape, ctx.layer, ctx.later = x.shape, layer, later
        with layer.pool.full_weight(layer, for_backward=False) as weight:
            out = linear(x, weight.T if layer.is_transposed else weight, bias)
        # Otherwise the caller could not write to it in place.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Gather the weight again for the input's gradient, while the weight's gradient is averaged into the shard."""
        x, _ = ctx.saved_tensors
        layer: ShardedLinear = ctx.layer
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        mean: InFlight[Tensor] | None = None
        of_input = of_weight = None
        if needs_input:
            with layer.pool.full_weight(layer, for_backward=True) as weight:
                mean = _begin_mean(layer, x, gradient_NO) if needs_weight else None  # in flight meanwhile
                of_input = gradient_NO.mm(weight.T if layer.is_transposed else weight).view(ctx.shape)
        elif needs_weight:
            mean = _begin_mean(layer, x, gradient_NO)
        of_bias = gradient_NO.sum(0) if needs_bias else None
        if mean is not None and ctx.later is not None:
            mean_in_flight = mean
            number = torch._C._current_graph_task_id()
            ctx.later[layer.weight] = WeightGradient(layer.weight, lambda: mean_in_flight, None, None, number)
        elif mean is not None:
            of_weight = mean.wait()
        return of_input, of_weight, of_bias, None, None


def _begin_mean(layer: ShardedLinear, x: Tensor, gradient_NO: Tensor) -> InFlight[Tensor] | None:
    """Compute a weight's gradient and begin to average it over the group; return None if the schedule defers both.

    Args:
        layer: the layer of the weight.
        x: input of the layer, (…, I).
        gradient_NO: gradient of its output.
    """
    x_NI = x.reshape(-1, x.shape[-1])

    def begin() -> InFlight[Tensor]:
        """Compute the gradient of the local batch, and begin its reduce-scatter."""
        gradient = weight_gradient(x_NI, gradient_NO, is_transposed=layer.is_transposed)
        return layer.pool.begin_mean(gradient)

    deferred = WeightGradient(layer.weight, begin, None, None, torch._C._current_graph_task_id())
    if layer.weight_gradients is not None and layer.weight_gradients.defer(deferred):
        return None
    return begin()


class Use(NamedTuple):
    """A use of a layer's weight: "forward", "again" (recomputed) or "backward"."""

    kind: str
    layer: Any


class PrefetchOrder:
    """Prefetch order recorded from previous iterations: the use that has always followed another in the same pass.

    The forward and the backward of a microbatch are passes. Nothing is prefetched beyond the end of a pass, since after
    the last one the optimizer writes to the weights. A wrong prefetch is never repeated, which bounds the
    cost of a model whose path changes. Equal uses in equal order prefetch the same weights on every rank.
    """

    def __init__(self) -> None:
        self._next: dict[Use, Use | None] = {}  # by use; None if the pass ends there, or the next use varies
        self._last: Use | None = None
        self._pass: set[Use] = set()  # uses since the pass began; a repeated use begins the next pass

    def after(self, use: Use) -> Use | None:
        """Return the expected next use; None if it is not known."""
        return self._next.get(use)

    def record(self, use: Use) -> None:
        """Record a use as the one that follows the last; where the order differs from before, forget it."""
        if self._last is not None:
            is_one_pass = (use.kind == "forward") == (self._last.kind == "forward") and use not in self._pass
            next_use = use if is_one_pass else None
            if self._next.setdefault(self._last, next_use) != next_use:
                self._next[self._last] = None
            if not is_one_pass:
                self._pass.clear()
        self._pass.add(use)
        self._last = use


class _Gathered(NamedTuple):
    """An all-gather of a weight.

    Args:
        layer: the layer of the weight.
        version: of the shard when the all-gather began, see `_version`.
        weight: the full weight, in flight.
    """

    layer: ShardedLinear
    version: tuple[int, int]
    weight: InFlight[Tensor]


class WeightPool:
    """Gathers the weights of the layers of one weight axis, and averages their gradients.

    Args:
        group: the weight axis.
        overlap: prefetch the weight of the next layer while one computes, and average a gradient while the previous
            layer computes its own. Without it every layer waits for both.
        gradient_dtype: the format in which gradients are averaged.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        overlap: bool = True,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.group = group
        self._overlap = overlap
        self._gradient_dtype = gradient_dtype
        self._order = PrefetchOrder()
        self._prefetched: _Gathered | None = None
        # For the next layer: the layer, the version of its weight and its `LaterProduct`; () if none is prepared.
        self._prepared: tuple[Any, ...] = ()

    @contextmanager
    def full_weight(self, layer: ShardedLinear, *, for_backward: bool) -> Iterator[Tensor]:
        """Provide the full weight of a layer to the computation inside this context, on the current stream.

        Begins the all-gather of this weight, unless it was prefetched, and of the expected next one. Every rank of the
        group calls it.

        Args:
            layer: the layer of the weight.
            for_backward: True for the layer's backward; its forward may run in a backward too (recomputation).
        """
        use = _use(layer, for_backward)
        self._order.record(use)
        gathered, self._prefetched = self._prefetched, None
        if gathered is not None and gathered[:2] != (layer, _version(layer.weight)):
            gathered.weight.wait()  # before its memory is free
            gathered = None
        gathered = gathered or self._begin_gather(layer)
        weight = gathered.weight.wait()
        next_use = self._order.after(use) if self._overlap else None
        if next_use is not None and next_use.layer is layer:  # the same weight again
            self._prefetched = gathered._replace(weight=InFlight(None, weight))
        elif next_use is not None:
            self._prefetched = self._begin_gather(next_use.layer)
        yield weight

    def begin_mean(self, gradient: Tensor) -> InFlight[Tensor]:
        """Begin to average a weight's gradient over the group, into this rank's shard.

        The mean over the full data axis is then the mean of this shard over its replicas on that axis. One
        reduce-scatter. Every rank of the group calls it.

        Args:
            gradient: (rows, …), unsharded, of the local batch.
        """
        size, rows = self.group.size(), gradient.shape[0]
        shard = gradient.new_empty((-(-rows // size), *gradient.shape[1:]), dtype=self._gradient_dtype)
        padded = shard.new_zeros((len(shard) * size, *shard.shape[1:]))
        padded[:rows].copy_(gradient).mul_(1 / size)  # in the format of the mean, which may be the wider one
        return InFlight(begin_reduce_scatter(shard.view(-1), padded.view(-1), self.group), shard)

    def later_gradient(self, layer: ShardedLinear) -> LaterProduct | None:
        """Return where a layer's gradient may stay in flight during the backward of the layer before; None: nowhere.

        Called in each forward, before the layer's own graph node is made. It was prepared by the call for the layer
        before, and this call prepares that of the expected next layer: autograd reaches nodes in reverse order, so the
        node made now is reached after the next layer's and this layer's backward.
        """
        prepared, self._prepared = self._prepared, ()
        next_use = self._order.after(_use(layer, for_backward=False))
        if self._overlap and next_use is not None and torch.is_grad_enabled() and not _in_backward():
            weight = next_use.layer.weight
            if weight.requires_grad and weight.is_leaf:
                _, later_product = enter_overlapped([weight], [_ENTERS_UNCHANGED], [weight])
                self._prepared = next_use.layer, _version(weight), later_product
        is_for_layer = prepared[:2] == (layer, _version(layer.weight))
        return prepared[2] if is_for_layer else None

    def _begin_gather(self, layer: ShardedLinear) -> _Gathered:
        """Begin to all-gather a layer's weight."""
        shard = layer.weight.detach()
        full = shard.new_empty((shard.shape[0] * self.group.size(), *shard.shape[1:]))
        handle = begin_all_gather(full.view(-1), shard.reshape(-1), self.group)
        return _Gathered(layer, _version(layer.weight), InFlight(handle, full[: layer.num_rows]))


def _use(layer: ShardedLinear, for_backward: bool) -> Use:
    """Return the use of a layer's weight that happens now, for the layer's backward or its (recomputed) forward."""
    return Use("backward" if for_backward else "again" if _in_backward() else "forward", layer)


def _in_backward() -> bool:
    """Return True while autograd computes gradients."""
    return bool(torch._C._current_graph_task_id() != -1)


def _version(weight: Parameter) -> tuple[int, int]:
    """Return a value that changes whenever the parameter is written to or moved."""
    return weight.data_ptr(), weight._version
