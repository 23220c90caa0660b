"""The linear function, with a weight gradient that may be deferred.

[Note: deferred weight gradients] There are two ways to defer. A schedule defers to a later action
(pipeline/weight_gradients.py). Within one backward, `beside` begins the all-reduce of input gradients first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ...cluster.collectives import InFlight, once_differentiable
from ...cluster.transformers_api import Conv1D
from ...pipeline.weight_gradients import DeferredGradient, WeightGradients

# N rows of all other dimensions together, I input features, O output features


class Regather:
    """All-gathers a layer's input again from the saved shard, once for all layers that multiply with it.

    Args:
        whole: the unsharded input.
        begin: begins the all-gather of the saved shard.
        overlap: begin when backward reaches the first of the layers.
    """

    def __init__(self, whole: Tensor, begin: Callable[[Tensor], InFlight[Tensor]], *, overlap: bool) -> None:
        self._of, self._version = ref(whole), whole._version
        self._begin, self._overlap = begin, overlap
        self._num_users = self._num_asked = 0
        self._in_flight: InFlight[Tensor] | None = None
        self._whole_NI: Tensor | None = None

    def is_of(self, x: Tensor) -> bool:
        """Return True for the unchanged input; the region's code may pass another tensor to a layer."""
        return self._of() is x and self._version == x._version

    def use(self) -> None:
        """Count one more layer that will request the input."""
        self._num_users += 1

    def begin(self, shard: Tensor) -> None:
        """Begin to gather, if that may overlap."""
        if self._overlap and self._in_flight is None and self._whole_NI is None:
            self._in_flight = self._begin(shard)

    def rows(self, shard: Tensor) -> Tensor:
        """Return the input (N, I), and release it after the request of the last layer."""
        if self._whole_NI is None:
            self._whole_NI = (self._in_flight or self._begin(shard)).wait().flatten(0, 1)
            self._in_flight = None
        whole_NI = self._whole_NI
        self._num_asked += 1
        if self._num_asked == self._num_users:
            self._whole_NI, self._num_asked = None, 0
        return whole_NI


class Crossing(NamedTuple):
    """Communication of a tensor at the entry of a region, and of its gradient in backward.

    Args:
        forward: communicates the tensor.
        begin_backward: begins to communicate the gradient.
    """

    forward: Callable[[Tensor], Tensor]
    begin_backward: Callable[[Tensor], InFlight[Tensor]]


class LaterProduct(NamedTuple):
    """A weight whose gradient is computed when backward reaches its `beside` node, not in its layer.

    Args:
        weight: the layer's weight.
        place: its index among the weights of the node.
        deferred: deferred gradients of the node's weights, by index.
    """

    weight: Tensor
    place: int
    deferred: dict[int, DeferredGradient]

    def put(self, gradient: DeferredGradient) -> None:
        """Defer a gradient, and drop those of a backward that never reached the node."""
        self.deferred[self.place] = gradient


def beside(
    xs: Sequence[Tensor], crossings: Sequence[Crossing], weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[LaterProduct]]:
    """Enter a region with some tensors, and overlap their gradients' communication with weight gradients in backward.

    A single node of the graph, made before the layers run, so that autograd reaches it after them. Gradients of
    gradients raise.

    Args:
        xs: the tensors.
        crossings: the communication of each tensor.
        weights: the weights of the layers in the region.
    """
    deferred: dict[int, DeferredGradient] = {}
    entered = _Beside.apply(crossings, deferred, *xs, *weights)
    through = enumerate(entered[len(xs) :])
    return list(entered[: len(xs)]), [LaterProduct(weight, place, deferred) for place, weight in through]


class _Beside(Function):
    """See `beside`."""

    @staticmethod
    def forward(
        ctx: Any, crossings: Sequence[Crossing], deferred: dict[int, DeferredGradient], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Cross the first tensors; the others are weights, whose gradients backward takes from `deferred` by place."""
        ctx.crossings, ctx.deferred = crossings, deferred
        ctx.set_materialize_grads(False)
        crossed = [crossing.forward(x) for crossing, x in zip(crossings, tensors, strict=False)]
        needed = ctx.needs_input_grad[2 : 2 + len(crossed)]
        if not all(needed):
            ctx.mark_non_differentiable(
                *[x for x, is_needed in zip(crossed, needed, strict=True) if not is_needed]
            )
        return (*crossed, *tensors[len(crossed) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Begin the communication of the inputs' gradients, and compute deferred products while it is in flight."""
        num_crossings = len(ctx.crossings)
        in_flight = [
            None if gradient is None else crossing.begin_backward(gradient)
            for crossing, gradient in zip(ctx.crossings, gradients, strict=False)
        ]
        weight_gradients = list(gradients[num_crossings:])
        while ctx.deferred:
            place, deferred = ctx.deferred.popitem()
            # Skip gradients of a backward that computed other gradients and never reached this node.
            if deferred.backward == torch._C._current_graph_task_id():
                product, other = deferred.begin().wait(), weight_gradients[place]
                weight_gradients[place] = product if other is None else other + product
        input_gradients = [None if crossing is None else crossing.wait() for crossing in in_flight]
        return None, None, *input_gradients, *weight_gradients


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_transposed: bool = False,
    store: WeightGradients | None = None,
    later_product: LaterProduct | None = None,
    input_shard: tuple[Tensor, Regather] | None = None,
) -> Tensor:
    """A linear layer whose weight gradient may be deferred; see [Note: deferred weight gradients].

    Backward computes the same products as autograd does for a linear layer: equal to the bit.

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        is_transposed: the weight is stored as in transformers' Conv1D.
        store: queue of the schedule; None where no schedule defers.
        later_product: defers this weight's gradient within one backward.
        input_shard: this rank's shard of `x`, saved for backward in its place, and how to gather `x` again.

    Returns:
        (..., O).
    """
    is_plain = store is None and later_product is None and input_shard is None
    if is_plain or not torch.is_grad_enabled() or not is_trained(weight) or _is_other_product():
        return _product(x, weight, bias, is_transposed)
    part, regather = input_shard or (None, None)
    through = weight if later_product is None else later_product.weight
    # The weight in the tuple is not an input of the node. The one that the node saves may be another object in
    # backward. One tuple, since torch inspects each argument.
    out: Tensor = _Linear.apply(
        x, through, bias, part, (weight, is_transposed, store, later_product, regather)
    )
    return out


def is_trained(weight: Tensor) -> bool:
    """Return True for a weight that is a trained leaf.

    A weight that is computed from others (weight_norm, pruning) has a graph that backward can run through only once.
    """
    return weight.is_leaf and weight.requires_grad


def _is_other_product() -> bool:
    # Under autocast a product has another format than its factors.
    return torch._C._is_any_autocast_enabled() or is_transformed()


def is_transformed() -> bool:
    """Return True if a call is traced, compiled, or run under functorch."""
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
        options: tuple[Parameter, bool, WeightGradients | None, LaterProduct | None, Regather | None],
    ) -> Tensor:
        """Compute the product; save x, or the part of it from which it is regathered. See `linear`."""
        ctx.save_for_backward(x if part is None else part, through)
        ctx.options = options
        _, is_transposed, _, _, regather = options
        if regather is not None:
            regather.use()
        out = _product(x, through, bias, is_transposed)
        # Otherwise the caller could not write to it in place.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the input's gradient at once, and the weight's now or later."""
        part, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        parameter, is_transposed, store, later_product, regather = ctx.options
        if regather is not None and needs_weight and not (store is not None and store.is_deferring):
            regather.begin(part)
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        gradient_of_input = gradient_of_weight = None
        if needs_input:
            gradient_of_input = gradient_NO.mm(weight.T if is_transposed else weight)
            gradient_of_input = gradient_of_input.view(*gradient.shape[:-1], gradient_of_input.shape[-1])
        if needs_weight:

            def product() -> Tensor:
                x_NI = part.reshape(-1, part.shape[-1]) if regather is None else regather.rows(part)
                return weight_gradient(x_NI, gradient_NO, is_transposed=is_transposed)

            gradient_of_weight = gradient_or_deferred(parameter, store, later_product, product)
        bias_gradient = gradient_NO.sum(0) if needs_bias else None
        return gradient_of_input, gradient_of_weight, bias_gradient, None, None


def gradient_or_deferred(
    weight: Parameter,
    store: WeightGradients | None,
    later_product: LaterProduct | None,
    product: Callable[[], Tensor],
) -> Tensor | None:
    """Return a weight's gradient, or None if it is deferred; called in backward.

    Args:
        weight: the model's parameter.
        store, later_product: see `linear`.
        product: computes the gradient.
    """
    if torch.is_grad_enabled():  # gradients of gradients may follow
        return product()
    deferred = DeferredGradient(weight, lambda: InFlight(None, product()), torch._C._current_graph_task_id())
    if store is not None and store.defer(deferred):
        return None
    if later_product is not None:
        later_product.put(deferred)
        return None
    return product()


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Tensor:
    """Return the gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
    return x_NI.T.mm(gradient_NO) if is_transposed else gradient_NO.T.mm(x_NI)


def needs_all_uses(module: nn.Embedding) -> bool:
    """Return True if an embedding changes a row, or its gradient, depending on all its uses in a batch."""
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
    """Defer the weight gradients of a model's plain and parallel linear layers; return the queue.

    The class of a plain layer becomes a subclass with the attribute of parallel layers, `weight_gradients`. Weights of
    other modules leave their gradients to autograd.
    """
    store = WeightGradients()
    for module in model.modules():
        if type(module) in _OWN:
            module.__class__ = _OWN[type(module)]
        if hasattr(module, "weight_gradients"):
            module.weight_gradients = store  # type: ignore[assignment]
    return store
