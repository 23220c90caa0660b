"""The linear function, with a weight gradient that may be deferred.

[Note: deferred weight gradients] There are two ways to defer. A schedule defers to a later action
(pipeline/weight_gradients.py). Within one backward, `enter_overlapped` begins the all-reduce of input gradients first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ...cluster.collectives import InFlight, once_differentiable
from ...cluster.device import is_cuda
from ...cluster.transformers_api import Conv1D
from ...pipeline.weight_gradients import WeightGradient, WeightGradientQueue
from .class_change import change_class

# N rows of all other dimensions together, I input features, O output features


class Regather:
    """All-gathers a layer's input again from the saved shard, once for all layers that multiply with it.

    Args:
        x: the unsharded input; only a weak reference to it is kept.
        begin: begins the all-gather of the saved shard.
        overlap: begin when backward reaches the first of the layers.
    """

    def __init__(self, x: Tensor, begin: Callable[[Tensor], InFlight[Tensor]], *, overlap: bool) -> None:
        self._input, self._input_version = ref(x), x._version
        self._begin, self._overlap = begin, overlap
        self._num_users = self._num_requests = 0  # layers in forward, and those served in this backward
        self._in_flight: InFlight[Tensor] | None = None
        self._full_NI: Tensor | None = None  # gathered, until the last request

    def is_of(self, x: Tensor) -> bool:
        """Return True if `x` is the unchanged input; the region's code may call a layer with another tensor."""
        return self._input() is x and self._input_version == x._version

    def add_user(self) -> None:
        """Count one more layer that will request the input."""
        self._num_users += 1

    def begin(self, shard: Tensor) -> None:
        """Begin to gather, if that may overlap."""
        if self._overlap and self._in_flight is None and self._full_NI is None:
            self._in_flight = self._begin(shard)

    def rows(self, shard: Tensor) -> Tensor:
        """Return the input (N, I), and release it after the request of the last layer."""
        if self._full_NI is None:
            self._full_NI = (self._in_flight or self._begin(shard)).wait().flatten(0, 1)
            self._in_flight = None
        full_NI = self._full_NI
        self._num_requests += 1
        if self._num_requests == self._num_users:
            self._full_NI, self._num_requests = None, 0
        return full_NI


class Crossing(NamedTuple):
    """Communication of a tensor at the entry of a region, and of its gradient in backward.

    Args:
        forward: communicates the tensor.
        begin_backward: begins to communicate the gradient.
    """

    forward: Callable[[Tensor], Tensor]
    begin_backward: Callable[[Tensor], InFlight[Tensor]]


Deferred = dict[Tensor, WeightGradient]  # by weight


class LaterProduct(NamedTuple):
    """Weights whose gradients are computed when backward reaches the node of `enter_overlapped`, not in their layers.

    Args:
        entered: a tensor that has entered there. The layers' nodes take it as an input, so that backward reaches the
            node of `enter_overlapped` after them, whatever they multiply with.
        deferred: their gradients, until backward reaches that node, by weight. A gradient replaces one that an earlier
            backward left without reaching the node.
    """

    entered: Tensor
    deferred: Deferred


def enter_overlapped(
    xs: Sequence[Tensor], crossings: Sequence[Crossing], weights: Sequence[Tensor]
) -> tuple[list[Tensor], LaterProduct | None]:
    """Enter a region with some tensors, and overlap their gradients' communication with weight gradients in backward.

    A single node of the graph, made before the layers run, so that autograd reaches it after them: layers leave their
    weight gradients to it, and it computes them while the gradients of the tensors are in flight. Gradients of
    gradients raise.

    Args:
        xs: the tensors.
        crossings: the communication of each tensor.
        weights: the weights of the layers in the region, each once.

    Returns:
        The tensors inside the region, and where layers leave the gradients of the weights; None if no tensor has a
        gradient to wait for.
    """
    deferred: Deferred = {}
    entered = _EnterOverlapped.apply((crossings, weights, deferred), *xs, *weights)
    first = next((x for x in entered if x.requires_grad), None)
    return list(entered), None if first is None else LaterProduct(first, deferred)


class _EnterOverlapped(Function):
    """See `enter_overlapped`."""

    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[Sequence[Crossing], Sequence[Tensor], Deferred],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Communicate the tensors that enter.

        Args:
            options: the crossings, the weights, and their deferred gradients. A tuple, because torch spends time on
                each argument.
            tensors: the tensors that enter, then the weights, whose gradients this node returns.
        """
        ctx.crossings, ctx.weights, ctx.deferred = options
        ctx.set_materialize_grads(False)
        crossed = [crossing.forward(x) for crossing, x in zip(ctx.crossings, tensors, strict=False)]
        needed = ctx.needs_input_grad[1 : 1 + len(crossed)]
        if not all(needed):
            ctx.mark_non_differentiable(
                *[x for x, is_needed in zip(crossed, needed, strict=True) if not is_needed]
            )
        return tuple(crossed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Begin the communication of the inputs' gradients, and compute deferred products while it is in flight."""
        in_flight = [
            None if gradient is None else crossing.begin_backward(gradient)
            for crossing, gradient in zip(ctx.crossings, gradients, strict=True)
        ]
        weight_gradients: list[Tensor | None] = []
        for weight in ctx.weights:
            deferred = ctx.deferred.pop(weight, None)
            # Others were left by an earlier backward that did not reach this node, as of autograd.grad.
            if deferred is None or deferred.backward_number != torch._C._current_graph_task_id():
                weight_gradients.append(None)
            else:
                weight_gradients.append(deferred.compute())
        input_gradients = [None if handle is None else handle.wait() for handle in in_flight]
        return None, *input_gradients, *weight_gradients


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_transposed: bool = False,
    store: WeightGradientQueue | None = None,
    later_product: LaterProduct | None = None,
    input_shard: tuple[Tensor, Regather] | None = None,
) -> Tensor:
    """A linear layer whose weight gradient may be deferred; see [Note: deferred weight gradients].

    Backward computes the same products as autograd does for a linear layer: equal to the bit, but for the sums in
    [Note: gradients added by their product] (pipeline/weight_gradients.py).

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        is_transposed: the weight is stored as in transformers' Conv1D.
        store: the weight gradients of the schedule, which defers or adds this one; None without a schedule.
        later_product: defers this weight's gradient within one backward.
        input_shard: this rank's shard of `x`, saved for backward instead of it, and how to gather `x` again.

    Returns:
        (..., O).
    """
    is_plain = store is None and later_product is None and input_shard is None
    if (
        is_plain
        or not torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()  # it changes the format
        or torch._C._are_functorch_transforms_active()
        or x.is_nested
        or x.layout is not torch.strided
    ):
        return _product(x, weight, bias, is_transposed)
    if later_product is None and (_is_traced() or not is_trained(weight)):  # otherwise `enter` asked this
        return _product(x, weight, bias, is_transposed)
    routed, deferred = later_product or (weight, None)
    # A tuple, because torch spends time on each argument.
    out: Tensor = _apply_linear(x, routed, bias, (weight, is_transposed, store, deferred, input_shard))
    return out


def is_trained(weight: Tensor) -> bool:
    """Return True for a weight that is a trained leaf.

    A weight that is computed from others (weight_norm, pruning) has a graph that backward can run through only once.
    """
    return weight.is_leaf and weight.requires_grad


def is_transformed() -> bool:
    """Return True if a call is traced, compiled, or run under functorch."""
    return _is_traced() or torch._C._are_functorch_transforms_active()


def _is_traced() -> bool:
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    """Return the output of a linear layer."""
    return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)


class _Linear(Function):
    """See `linear`. Gradients of gradients are autograd's own, unless the weight's comes later or a shard is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routed: Tensor,
        bias: Tensor | None,
        options: tuple[
            Parameter, bool, WeightGradientQueue | None, Deferred | None, tuple[Tensor, Regather] | None
        ],
    ) -> Tensor:
        """Compute the product; save x, or this rank's shard of it, from which it is gathered again.

        Args:
            x, bias: see `linear`.
            routed: the weight, for its gradient; or `LaterProduct.entered`, which gets none.
            options: further arguments of `linear`: weight, is_transposed, store, `LaterProduct.deferred`, input_shard.
        """
        weight, is_transposed, store, deferred, input_shard = options
        saved_input, regather = input_shard or (x, None)
        ctx.save_for_backward(saved_input, weight)
        # The parameter itself, too: a saved tensor may be another object in backward.
        ctx.options = weight, is_transposed, store, deferred, regather
        if regather is not None:
            regather.add_user()
        out = _product(x, weight, bias, is_transposed)
        # Otherwise the caller could not write to it in place.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the input's gradient at once, and the weight's now or later; see `gradient_or_deferred`."""
        saved_input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        parameter, is_transposed, store, later, regather = ctx.options
        if regather is not None and needs_weight and not (store is not None and store.is_deferring):
            regather.begin(saved_input)
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        gradient_of_input = gradient_of_weight = None
        if needs_input:
            gradient_of_input = gradient_NO.mm(weight.T if is_transposed else weight)
            gradient_of_input = gradient_of_input.view(*gradient.shape[:-1], gradient_of_input.shape[-1])
        if needs_weight:
            product = WeightProduct(saved_input, gradient_NO, is_transposed, regather)
            gradient_of_weight = gradient_or_deferred(parameter, store, later, product)
        bias_gradient = gradient_NO.sum(0) if needs_bias else None
        return gradient_of_input, gradient_of_weight, bias_gradient, None


# `Function.apply` would first search all arguments for tensors of functorch; under it `linear` makes no node.
_apply_linear = super(Function, _Linear).apply


class WeightProduct(NamedTuple):
    """The product that is the gradient of a linear layer's weight.

    Args:
        x: the saved input, (..., I), or with `regather` this rank's shard of it.
        gradient_NO: the gradient of the output.
        is_transposed: the weight is (I, O).
        regather: gathers the input again; None if it was saved in full.
    """

    x: Tensor
    gradient_NO: Tensor
    is_transposed: bool
    regather: Regather | None = None

    def begin(self) -> InFlight[Tensor]:
        """Compute the gradient, in the shape of the weight."""
        return InFlight(None, weight_gradient(self._rows(), self.gradient_NO, self.is_transposed))

    def add_to(self, total: Tensor) -> None:
        """Compute the gradient and add it to a tensor in the shape of the weight."""
        add_product(total, *_factors(self._rows(), self.gradient_NO, self.is_transposed))

    def _rows(self) -> Tensor:
        return self.x.reshape(-1, self.x.shape[-1]) if self.regather is None else self.regather.rows(self.x)


def gradient_or_deferred(
    weight: Parameter, store: WeightGradientQueue | None, later: Deferred | None, product: WeightProduct
) -> Tensor | None:
    """Return a weight's gradient, or None if it is deferred or in `weight.grad` already; called in backward.

    Args:
        weight: the model's parameter.
        store: see `linear`; not used where gradients of gradients may follow.
        later: receives the gradient, see `LaterProduct`; None if nothing does.
        product: the gradient.
    """
    if torch.is_grad_enabled():
        store = None
    number = torch._C._current_graph_task_id()
    gradient = WeightGradient(weight, product.begin, product.add_to, store, number)
    if store is not None and store.defer(gradient):
        return None
    if later is None:
        return gradient.compute()
    later[weight] = gradient
    return None


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, is_transposed: bool) -> Tensor:
    """Return the gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
    a, b = _factors(x_NI, gradient_NO, is_transposed)
    return a.mm(b)


def _factors(x_NI: Tensor, gradient_NO: Tensor, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the matrices whose product is the gradient of a linear layer's weight."""
    return (x_NI.T, gradient_NO) if is_transposed else (gradient_NO.T, x_NI)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a tensor, in place, by the kernel of the product; on CUDA without rounding a @ b to its format."""
    # CPUs round sums in 16 bits, and those with products of a vector, in another way than in two steps.
    is_fused = total.itemsize >= 4 and min(*a.shape, *b.shape) > 1
    if is_fused and a.dtype == total.dtype:
        total.addmm_(a, b)
    elif is_fused and is_cuda(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def needs_all_uses(module: nn.Embedding) -> bool:
    """Return True if an embedding's rows or gradients depend on all look-ups of a batch, not of one rank."""
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


class DeferrableLinear(nn.Linear):
    """A linear layer whose weight gradient a schedule may defer, or add by its product."""

    weight_gradients: WeightGradientQueue | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, store=self.weight_gradients)


class _DeferrableConv1D(Conv1D):
    """A Conv1D of transformers whose weight gradient a schedule may defer, or add by its product."""

    weight_gradients: WeightGradientQueue | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, is_transposed=True, store=self.weight_gradients)


_DEFERRABLE = {nn.Linear: DeferrableLinear, Conv1D: _DeferrableConv1D}


def track_weight_gradients(model: nn.Module) -> WeightGradientQueue:
    """Let a schedule defer and add the weight gradients of a model's linear layers, plain and parallel; return them.

    The class of a plain layer becomes a subclass with the attribute of parallel layers, `weight_gradients`. Weights of
    other modules leave their gradients to autograd.
    """
    store = WeightGradientQueue()
    for module in model.modules():
        if type(module) in _DEFERRABLE:
            change_class(module, _DEFERRABLE[type(module)])
        if hasattr(module, "weight_gradients"):
            module.weight_gradients = store  # type: ignore[assignment]
    return store
