"""Linear layers that hold a piece of their weight and compute with the whole. Gathering it is weight_pool.py.

The weight parallelism of InternEvo (arXiv:2401.09149, section 3.3), by an autograd function.
"""

# B batch, S sequence, N all of them together, I input features, O output features

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ...cluster.placement import Shard, place
from ...pipeline.weight_gradients import DeferredGradient, WeightGradients
from .parallel_module import ParallelModule, require_native
from .weight_gradient import LaterProduct, weight_gradient
from .weight_pool import WeightPool

KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)


class WeightParallelLinear(ParallelModule):
    """A linear layer whose weight is shared out over ranks, each with inputs of its own.

    The weight is gathered for each use, in forward and again for the input's gradient in backward. Its gradient is
    reduce-scattered: this rank's piece gets the mean over the group. A bias stays whole, with the gradient of this
    rank's inputs. Every rank of the group runs the same such layers, in the same order and equally often.

    Args:
        native: an nn.Linear, which holds (O, I), or a transformers Conv1D, which holds (I, O).
        process_group: the weight axis.
        native_class: the class of `native`, where it is one of its own that computes what nn.Linear does.
        pool: gathers for all layers of the group; None is one of its own, which gathers nothing ahead.
    """

    weight_gradients: WeightGradients | None = (
        None  # where backward holds them back, see pipeline/weight_gradients.py
    )

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
        pool: WeightPool | None = None,
    ) -> None:
        require_native(native, *KINDS if native_class is None else (native_class,))
        super().__init__()
        self.is_transposed = isinstance(native, Conv1D)
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        self.bias: Parameter | None = native.bias  # type: ignore[assignment]
        self.in_features, self.out_features = _features(native)
        size, rows = process_group.size(), self.in_features if self.is_transposed else self.out_features
        # The dimension that comes first in memory: the pieces end to end are the whole.
        padded = (-(-rows // size) * size,)
        place(
            self.weight,
            Shard(size=size, dim=0, blocks=(rows,), padded=padded, axis="weight"),
            process_group.rank(),
        )
        self.pool = WeightPool(process_group) if pool is None else pool
        self.pool.add(self)
        self.train(native.training)

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "WeightParallelLinear":
        """See the class for the arguments; takes an nn.Linear or a transformers Conv1D."""
        return WeightParallelLinear(module, process_group, **kwargs)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I) in, (B, S, O) out, of this rank's batch. One all-gather.

        Raises:
            RuntimeError: under autocast, whose products are of other formats than the weight that is gathered.
        """
        if x_BSI.is_meta:  # a stage calls it for the shape of what another stage computes
            return x_BSI.new_empty(*x_BSI.shape[:-1], self.out_features)
        if torch.is_autocast_enabled(x_BSI.device.type):
            raise RuntimeError(
                "a weight-parallel layer computes in the format of its weight and was called under torch.autocast: "
                "leave autocast out and give the plugin precision='bf16' or 'fp16'"
            )
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
    """How many features go in and come out; a tied weight may be cut already."""
    if isinstance(native, Conv1D):
        return native.nx, native.nf
    assert isinstance(native, nn.Linear)
    return native.in_features, native.out_features


class _GatheredLinear(Function):
    """The products are those of a plain linear layer; of the weight only the piece is kept in between."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        piece: Tensor,
        bias: Tensor | None,
        layer: WeightParallelLinear,
        later: LaterProduct | None,
    ) -> Tensor:
        # The piece for autograd's own check alone, that nobody writes to it before backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, piece)
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
        layer = ctx.layer
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])

        def begin_weight() -> Callable[[], Tensor] | None:
            return _begin_weight_gradient(layer, x, gradient_NO) if needs_weight else None

        if needs_input:
            with layer.pool.whole(layer, for_backward=True) as weight:
                of_weight = begin_weight()  # its mean travels while the next line computes
                of_input = gradient_NO.mm(weight.T if layer.is_transposed else weight).view(ctx.shape)
        else:
            of_weight, of_input = begin_weight(), None
        of_bias = gradient_NO.sum(0) if needs_bias else None
        return of_input, _ended(of_weight, layer, ctx.later), of_bias, None, None


def _begin_weight_gradient(
    layer: WeightParallelLinear, x: Tensor, gradient_NO: Tensor
) -> Callable[[], Tensor] | None:
    """Begin this rank's piece of the mean gradient, unless the schedule holds it back."""
    x_NI = x.reshape(-1, x.shape[-1])

    def begin() -> Callable[[], Tensor]:
        return layer.pool.begin_mean(
            layer, weight_gradient(x_NI, gradient_NO, is_transposed=layer.is_transposed)
        )

    held = DeferredGradient(layer.weight, begin, torch._C._current_graph_task_id())
    if layer.weight_gradients is not None and layer.weight_gradients.defer(held):
        return None
    return begin()


def _ended(
    begun: Callable[[], Tensor] | None, layer: WeightParallelLinear, later: LaterProduct | None
) -> Tensor | None:
    """The gradient that was begun, or None where it waits."""
    if begun is None:
        return None
    if later is None:
        return begun()
    later.put(DeferredGradient(layer.weight, lambda: begun, torch._C._current_graph_task_id()))
    return None
