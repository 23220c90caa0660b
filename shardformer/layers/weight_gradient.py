"""The linear function, with a weight gradient that may be deferred, or added at once to where gradients accumulate.

[Note: deferred weight gradients] There are two ways to defer. A schedule defers to a later action
(pipeline/weight_gradients.py). Within one backward `LaterProduct` lets the sum of input gradients over ranks begin
first (cluster/collectives.py, `copy_beside`).

A gradient that is added to its owner's memory is never made whole first, and read again to be added.

[Note: gradients of rows] In every backward autograd makes of an embedding a gradient as large as the whole table: zeros
but for the rows that the microbatch looked up. It is filled, and read again to be added to the accumulated gradient.
Here only those rows are added. Each is summed over the microbatch first, as autograd does: equal to the bit.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ...cluster.collectives import InFlight
from ...pipeline.weight_gradients import DeferredGradient, Factors, GradientOwner, Owner, WeightGradients

# N rows of all other dimensions together, I input features, O output features; of embeddings
# N entries that are looked up, V rows of the table, H hidden


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
            if each.backward == torch._C._current_graph_task_id() and each.added() is None:
                product = each.begin().wait()
                gradient = product if gradient is None else gradient + product
        return gradient, None


# A weight, and `store`, `owner` and `later` of `linear`.
Deferral = tuple[Parameter, WeightGradients | None, Owner | None, LaterProduct | None]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_transposed: bool = False,
    store: WeightGradients | None = None,
    owner: Owner | None = None,
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
        owner: of the weight's gradient; None leaves it to autograd.
        later: of this weight, for a gradient that is deferred within one backward.
        kept: a smaller tensor to keep for backward, and how to get `x` again from it.

    Returns:
        (..., O).
    """
    is_plain = store is None and owner is None and later is None and kept is None
    if is_plain or not torch.is_grad_enabled() or not _is_own(x, weight):
        return _product(x, weight, bias, is_transposed)
    part, again = (None, None) if kept is None else kept
    through = weight if later is None else later.weight
    deferral = (
        cast(Parameter, weight),
        store,
        owner,
        later,
    )  # in a tuple the weight itself is no input of the node
    out: Tensor = _Linear.apply(x, through, bias, part, again, is_transposed, deferral)
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
        deferral: Deferral,
    ) -> Tensor:
        ctx.save_for_backward(x if part is None else part, through)
        ctx.again, ctx.is_transposed, ctx.deferral = again, is_transposed, deferral
        if again is not None:
            again.use()
        out = _product(x, through, bias, is_transposed)
        return torch.ops.aten._unsafe_view(out, out.shape)  # or what follows could not write to it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        again: Regather | None = ctx.again
        store = ctx.deferral[1]
        if again is not None and needs_weight and not (store is not None and store.is_deferring):
            again.begin(part)
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = None
        if needs_input:
            of_input = gradient_NO.mm(weight.T if ctx.is_transposed else weight)
            of_input = of_input.view(*gradient.shape[:-1], of_input.shape[-1])
        if needs_weight:

            def factors() -> Factors:
                x_NI = part.reshape(-1, part.shape[-1]) if again is None else again.rows(part)
                return _factors(x_NI, gradient_NO, is_transposed=ctx.is_transposed)

            of_weight = gradient_or_deferred(factors, *ctx.deferral)
        return of_input, of_weight, gradient_NO.sum(0) if needs_bias else None, None, None, None, None


def gradient_or_deferred(
    factors: Callable[[], Factors],
    weight: Parameter,
    store: WeightGradients | None,
    owner: Owner | None,
    later: LaterProduct | None = None,
) -> Tensor | None:
    """A weight's gradient, or None where it is deferred or was added to its owner's memory.

    Args:
        factors: gives the two matrices whose product it is.
        weight: a parameter.
        store, owner, later: see `linear`.
    """
    if torch.is_grad_enabled():  # a gradient of gradients may be wanted
        return torch.mm(*factors())

    def begin() -> InFlight[Tensor]:
        return InFlight(None, torch.mm(*factors()))

    deferred = DeferredGradient(weight, begin, torch._C._current_graph_task_id(), factors, owner)
    if store is not None and store.defer(deferred):
        return None
    if later is not None:
        later.put(deferred)
        return None
    return None if deferred.added() is not None else torch.mm(*factors())


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Tensor:
    """The gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
    return torch.mm(*_factors(x_NI, gradient_NO, is_transposed=is_transposed))


def _factors(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Factors:
    return (x_NI.T, gradient_NO) if is_transposed else (gradient_NO.T, x_NI)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, *, owner: Owner | None) -> Tensor:
    """`torch.nn.functional.embedding`, whose backward adds rows where they are taken.

    Args:
        ids: which rows, in any shape.
        weight: (V, H).
        padding_idx: a row that gets no gradient, counted from 0.
        owner: of the weight's gradient; None leaves it to autograd.

    Returns:
        (*ids.shape, H).
    """
    # As many entries as the table has rows win nothing. A weight that is computed from others has a graph.
    is_own = isinstance(weight, Parameter) and weight.requires_grad and torch.is_grad_enabled()
    is_taken = is_own and not is_transformed() and ids.numel() < weight.shape[0]
    if owner is None or owner() is None or not is_taken:
        return F.embedding(ids, weight, padding_idx)
    out: Tensor = _RowEmbedding.apply(ids, weight, padding_idx, owner)
    return out


class _RowEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Parameter, padding_idx: int | None, owner: Owner) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.owner = weight, owner
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        parameter = ctx.parameter
        owner = None if torch.is_grad_enabled() else ctx.owner.of(parameter)
        if owner is None:
            num_rows = parameter.shape[0]
            whole = torch.ops.aten.embedding_dense_backward(gradient, ids, num_rows, ctx.padding_idx, False)
            return None, whole, None, None
        if ids.numel():
            owner.add_rows(parameter, *summed_by_row(ids.flatten().long(), gradient, ctx.padding_idx))
        return None, None, None, None


def summed_by_row(ids_N: Tensor, gradient: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The rows that were looked up, and the sum of each one's gradients, in the order in which autograd sums.

    The host does not wait for the device: there are as many results as entries, and those left over are zeros
    for row 0.

    Args:
        ids_N: int64, at least one: which row each gradient belongs to.
        gradient: (..., H), N × H elements.
        padding_idx: a row that gets zeros; -1 for none.

    Returns:
        rows (N), values (N, H).
    """
    count = ids_N.numel()
    sorted_N, order_N = ids_N.sort()
    is_new_N = torch.ones_like(sorted_N)
    is_new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    place_N = is_new_N.cumsum(0) - 1
    rows_N = torch.zeros_like(ids_N).scatter_(0, place_N, sorted_N)
    places_N = torch.empty_like(ids_N).scatter_(0, order_N, place_N)
    values_NH = torch.ops.aten.embedding_dense_backward(
        gradient.reshape(count, -1), places_N, count, -1, False
    )
    if padding_idx >= 0:
        values_NH = values_NH.masked_fill_((rows_N == padding_idx).unsqueeze(1), 0.0)
    return rows_N, values_NH


def needs_all_uses(module: nn.Embedding) -> bool:
    """Return True where an embedding changes a row, or its gradient, by all uses of it in a batch."""
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


class _OwnLinear(nn.Linear):
    weight_gradients: WeightGradients | None = None
    gradient_owner: Owner | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, store=self.weight_gradients, owner=self.gradient_owner)


class _OwnConv1D(Conv1D):
    weight_gradients: WeightGradients | None = None
    gradient_owner: Owner | None = None

    def forward(self, x: Tensor) -> Tensor:
        store, owner = self.weight_gradients, self.gradient_owner
        return linear(x, self.weight, self.bias, is_transposed=True, store=store, owner=owner)


class _OwnEmbedding(nn.Embedding):
    gradient_owner: Owner | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx, owner=self.gradient_owner)


_OWN = {nn.Linear: _OwnLinear, Conv1D: _OwnConv1D, nn.Embedding: _OwnEmbedding}


def _own_layers(model: nn.Module) -> None:
    """Let a model's plain linear layers and embeddings compute their own gradients: their class becomes a subclass.

    The subclass has the attributes of parallel layers, `weight_gradients` and `gradient_owner`. Any other module that
    holds a weight leaves its gradient to autograd.
    """
    for module in model.modules():
        own = _OWN.get(type(module))  # some stand-ins let nobody set their class
        if own is not None and not (isinstance(module, nn.Embedding) and needs_all_uses(module)):
            module.__class__ = own


def defer_weight_gradients(model: nn.Module) -> WeightGradients:
    """Let a model's linear layers, plain or parallel, defer their weight gradients; returns the queue."""
    _own_layers(model)
    store = WeightGradients()
    for module in model.modules():
        if hasattr(module, "weight_gradients"):
            module.weight_gradients = store  # type: ignore[assignment]
    return store


def give_gradients_to(owner: GradientOwner, model: nn.Module) -> None:
    """Let a model's linear layers and embeddings, plain or parallel, add their weights' gradients to an owner's memory.

    Before their classes change again, as for fused kernels.
    A weight that several modules use is left to autograd, which sums over its uses before it adds to that memory.
    """
    _own_layers(model)
    uses = Counter(weight for module in model.modules() for weight in module._parameters.values())
    for module in model.modules():
        if hasattr(module, "gradient_owner"):
            is_used_once = uses[module.weight] == 1  # type: ignore[index]
            module.gradient_owner = Owner(owner) if is_used_once else None  # type: ignore[assignment]
