"""The linear function, with a weight gradient that may be deferred.

[Note: deferred weight gradients] There are two ways to defer. A schedule defers to a later action
(pipeline/weight_gradients.py). Within one backward `LaterProduct` lets the sum of input gradients over ranks begin
first (cluster/collectives.py, `copy_beside`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ...cluster.collectives import InFlight
from ...pipeline.weight_gradients import DeferredGradient, WeightGradients

# N rows of all other dimensions together, I input features, O output features


class Regather:
    """Gathers a layer's input again, of which forward kept a part, once for all layers that multiply with it.

    Args:
        whole: the input.
        begin: begins to gather, from the part that was kept. One all-gather.
        overlap: begin where the first of the layers is reached in backward.
    """

    def __init__(self, whole: Tensor, begin: Callable[[Tensor], InFlight[Tensor]], *, overlap: bool) -> None:
        self._of, self._version = ref(whole), whole._version
        self._begin, self._overlap = begin, overlap
        self._num_users = self._num_asked = 0
        self._in_flight: InFlight[Tensor] | None = None
        self._whole_NI: Tensor | None = None

    def is_of(self, x: Tensor) -> bool:
        """Return True for the input, unchanged; the region's code may hand a layer another one."""
        return self._of() is x and self._version == x._version

    def use(self) -> None:
        """Count one more layer that will ask for it."""
        self._num_users += 1

    def begin(self, kept: Tensor) -> None:
        """Begin to gather, if that may overlap."""
        if self._overlap and self._in_flight is None and self._whole_NI is None:
            self._in_flight = self._begin(kept)

    def rows(self, kept: Tensor) -> Tensor:
        """The input (N, I). The last layer that asks has it forgotten."""
        if self._whole_NI is None:
            self._whole_NI = (self._in_flight or self._begin(kept)).wait().flatten(0, 1)
            self._in_flight = None
        whole_NI = self._whole_NI
        self._num_asked += 1
        if self._num_asked == self._num_users:
            self._whole_NI, self._num_asked = None, 0
        return whole_NI


class LaterProduct:
    """A weight whose gradient is computed when autograd comes to where this was made, not in the layer's backward.

    Made before the layer runs, so autograd comes to it after everything that was made in between.
    """

    def __init__(self, weight: Tensor) -> None:
        self.deferred: list[DeferredGradient] = []
        self.weight: Tensor = _Later.apply(weight, self.deferred)

    def put(self, gradient: DeferredGradient) -> None:
        """Defer a gradient, and forget those of backwards that asked for gradients of inputs alone."""
        self.deferred[:] = [each for each in self.deferred if each.backward == gradient.backward] + [gradient]


class _Later(Function):
    """The weight itself; backward computes the gradients that the layer deferred."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, deferred: list[DeferredGradient]) -> Tensor:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        while ctx.deferred:
            each = ctx.deferred.pop()
            # Not of a backward that asked for gradients of inputs alone, and never came here.
            if each.backward == torch._C._current_graph_task_id():
                product = each.begin().wait()
                gradient = product if gradient is None else gradient + product
        return gradient, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_transposed: bool = False,
    store: WeightGradients | None = None,
    later: LaterProduct | None = None,
    kept: tuple[Tensor, Regather] | None = None,
) -> Tensor:
    """A linear layer whose weight gradient may be deferred; see [Note: deferred weight gradients].

    Backward computes the same products as autograd does for a linear layer: equal to the bit.

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        is_transposed: the weight is that of transformers' Conv1D.
        store: queue of the schedule; None where no schedule defers.
        later: of this weight, for a gradient that is deferred within one backward.
        kept: a smaller tensor to keep for backward, and how to get `x` again from it.

    Returns:
        (..., O).
    """
    is_plain = store is None and later is None and kept is None
    if is_plain or not torch.is_grad_enabled() or not _is_own(x, weight):
        return _product(x, weight, bias, is_transposed)
    part, again = (None, None) if kept is None else kept
    through = weight if later is None else later.weight
    # Bound, the weight itself is no input of the node; what the node saves of it may be another object in backward.
    finish = partial(gradient_or_deferred, cast(Parameter, weight), store, later)
    out: Tensor = _Linear.apply(x, through, bias, part, again, is_transposed, store, finish)
    return out


def _is_own(x: Tensor, weight: Tensor) -> bool:
    # A weight that is computed from others (weight_norm, pruning) has a graph that backward runs through once; under
    # autocast products are of other formats than their factors.
    is_trained = weight.is_leaf and weight.requires_grad
    return is_trained and not torch.is_autocast_enabled(x.device.type) and not is_transformed()


def is_transformed() -> bool:
    """Return True where a call is traced, compiled, or run under functorch."""
    is_traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return is_traced or torch._C._are_functorch_transforms_active()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)


class _Linear(Function):
    """See `linear`. Gradients of gradients are autograd's own, except where the input is gathered again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        through: Tensor,
        bias: Tensor | None,
        part: Tensor | None,
        again: Regather | None,
        is_transposed: bool,
        store: WeightGradients | None,
        finish: Callable[[Callable[[], Tensor]], Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(x if part is None else part, through)
        ctx.again, ctx.is_transposed, ctx.store, ctx.finish = again, is_transposed, store, finish
        if again is not None:
            again.use()
        out = _product(x, through, bias, is_transposed)
        return torch.ops.aten._unsafe_view(out, out.shape)  # or what follows could not write to it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        again: Regather | None = ctx.again
        if again is not None and needs_weight and not (ctx.store is not None and ctx.store.is_deferring):
            again.begin(part)
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = None
        if needs_input:
            of_input = gradient_NO.mm(weight.T if ctx.is_transposed else weight)
            of_input = of_input.view(*gradient.shape[:-1], of_input.shape[-1])
        if needs_weight:

            def product() -> Tensor:
                x_NI = part.reshape(-1, part.shape[-1]) if again is None else again.rows(part)
                return weight_gradient(x_NI, gradient_NO, is_transposed=ctx.is_transposed)

            of_weight = ctx.finish(product)
        return of_input, of_weight, gradient_NO.sum(0) if needs_bias else None, None, None, None, None, None


def gradient_or_deferred(
    weight: Parameter,
    store: WeightGradients | None,
    later: LaterProduct | None,
    product: Callable[[], Tensor],
) -> Tensor | None:
    """A weight's gradient, or None where it is deferred; called in backward.

    Args:
        weight: as the model holds it.
        store, later: as of `linear`.
        product: computes the gradient.
    """
    if torch.is_grad_enabled():  # a gradient of gradients may be wanted
        return product()
    deferred = DeferredGradient(weight, lambda: InFlight(None, product()), torch._C._current_graph_task_id())
    if store is not None and store.defer(deferred):
        return None
    if later is not None:
        later.put(deferred)
        return None
    return product()


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Tensor:
    """The gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
    return x_NI.T.mm(gradient_NO) if is_transposed else gradient_NO.T.mm(x_NI)


def needs_all_uses(module: nn.Embedding) -> bool:
    """Return True where an embedding changes a row, or its gradient, by all uses of it in a batch."""
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


class OwnLinear(nn.Linear):
    """A linear layer whose weight gradient a schedule may defer."""

    weight_gradients: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, store=self.weight_gradients)


class _OwnConv1D(Conv1D):
    weight_gradients: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, is_transposed=True, store=self.weight_gradients)


_OWN = {nn.Linear: OwnLinear, Conv1D: _OwnConv1D}


def defer_weight_gradients(model: nn.Module) -> WeightGradients:
    """Let a model's linear layers, plain or parallel, defer their weight gradients; returns the queue.

    The class of a plain one becomes a subclass with the attribute of parallel layers, `weight_gradients`. Any other
    module that holds a weight leaves its gradient to autograd.
    """
    store = WeightGradients()
    for module in model.modules():
        if type(module) in _OWN:
            module.__class__ = _OWN[type(module)]
        if hasattr(module, "weight_gradients"):
            module.weight_gradients = store  # type: ignore[assignment]
    return store
