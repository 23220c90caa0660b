"""Backward in two parts: input gradients now, weight gradients of linear layers later. When is the schedule's.

A linear layer computes two products in backward. The one that gives its input's gradient is what the stages
before wait for; the one that gives its weight's can wait until nothing else is to be done (arXiv:2401.10241,
section 2). Everything else that has a gradient (norms, embeddings, biases) is cheap, and gets it in the first
part.

Within one backward a layer's weight gradient may wait too, for the sum of input gradients over ranks to begin
(`LaterProduct`; cluster/collectives.py, `copy_beside`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ..cluster.hooks import has_foreign_hooks

# N rows of all other dimensions together, I input features, O output features


class HeldGradient(NamedTuple):
    """A weight's gradient that waits.

    Args:
        parameter: the weight, or this rank's piece of it.
        begin: computes the gradient, or begins to; what it returns gives it.
        backward: autograd's number of the one that it is of.
    """

    parameter: Parameter
    begin: Callable[[], Callable[[], Tensor]]
    backward: int


class WeightGradients:
    """Weight gradients that backwards held back, by stage and microbatch; one per rank."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], list[HeldGradient]] = {}
        self._holding: list[HeldGradient] | None = None

    @contextmanager
    def holding(self, place: tuple[int, int]) -> Iterator[None]:
        """Hold back what backwards compute inside, under this stage and microbatch."""
        self._holding = self._by_place[place] = []
        try:
            yield
        finally:
            self._holding = None

    def compute(self, place: tuple[int, int]) -> None:
        """Compute what was held back, and give it to the parameters as a backward would, hooks included."""
        held = self._by_place.pop(place)
        if held:
            with torch.no_grad():
                gradients = list(_each_beside_the_next(held))
            torch.autograd.backward([each.parameter for each in held], gradients)

    def forget(self) -> None:
        """Drop all that is held, after a step that broke off."""
        self._by_place.clear()

    def takes(self, held: HeldGradient) -> bool:
        """Hold this back, where that is asked for now. A weight that somebody has hooks for never is."""
        if self._holding is None or has_foreign_hooks(held.parameter):
            return False
        self._holding.append(held)
        return True


def _each_beside_the_next(held: Iterable[HeldGradient]) -> Iterator[Tensor]:
    """The gradients; each has time until the next has begun too."""
    under_way: Callable[[], Tensor] | None = None
    for each in held:
        begun = each.begin()
        if under_way is not None:
            yield under_way()
        under_way = begun
    if under_way is not None:
        yield under_way()


class LaterProduct:
    """A weight whose gradient is computed when autograd comes to where this was made, not in the layer's backward.

    Made before the layer runs, so autograd comes to it after everything that was made in between.
    """

    def __init__(self, weight: Tensor) -> None:
        self.held: list[HeldGradient] = []
        self.weight: Tensor = _Later.apply(weight, self.held)

    def put(self, held: HeldGradient) -> None:
        """Let a gradient wait, and forget those of backwards that asked for gradients of inputs alone."""
        self.held[:] = [each for each in self.held if each.backward == held.backward] + [held]


class _Later(Function):
    """The weight itself; its gradient is made of what the layer's backward put aside."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: list[HeldGradient]) -> Tensor:
        ctx.held = held
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        while ctx.held:
            held = ctx.held.pop()
            # Not of one that asked for gradients of inputs alone, and never came here.
            if held.backward == torch._C._current_graph_task_id():
                product = held.begin()()
                gradient = product if gradient is None else gradient + product
        return gradient, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    weight_gradients: WeightGradients | None,
    is_transposed: bool = False,
    later: LaterProduct | None = None,
) -> Tensor:
    """A linear layer whose weight gradient may be held back.

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        weight_gradients: where it is held; None where no schedule splits backwards.
        later: of this weight, for when its gradient is not held back that long.

    Returns:
        (..., O).
    """
    # A weight that is computed from others (weight_norm, pruning) has a graph that backward runs through once; under
    # autocast products are of other formats than what they are made of.
    is_own = weight.is_leaf and weight.requires_grad and not torch.is_autocast_enabled(x.device.type)
    if (weight_gradients is None and later is None) or not is_own or not torch.is_grad_enabled():
        return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)
    through = weight if later is None else later.weight
    keep = _Keep(cast(Parameter, weight), is_transposed, weight_gradients, later)
    out: Tensor = _SplitLinear.apply(x, through, bias, keep)
    return out


class _Keep(NamedTuple):
    """A linear layer's weight, and where its gradient may wait."""

    parameter: Parameter
    is_transposed: bool
    store: WeightGradients | None
    later: LaterProduct | None

    def gradient(self, x_NI: Tensor, gradient_NO: Tensor) -> Tensor | None:
        """The weight's gradient, or None where it waits."""
        begin = partial(_weight_gradient_now, x_NI, gradient_NO, self.is_transposed)
        held = HeldGradient(self.parameter, begin, torch._C._current_graph_task_id())
        if self.store is not None and self.store.takes(held):
            return None
        if self.later is None:
            return weight_gradient(x_NI, gradient_NO, self.is_transposed)
        self.later.put(held)
        return None


class _SplitLinear(Function):
    """The products of backward are those that autograd makes of a linear layer: equal to the bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: _Keep) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.keep = keep
        out = torch.nn.functional.linear(x, weight.T if keep.is_transposed else weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape)  # or what follows could not write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_input, _, needs_bias, _ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_bias = None
        if needs_input:
            of_input = gradient_NO.mm(weight.T if ctx.keep.is_transposed else weight).view(x.shape)
        if needs_bias:
            of_bias = gradient_NO.sum(0)
        return of_input, ctx.keep.gradient(x.reshape(-1, x.shape[-1]), gradient_NO), of_bias, None


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, is_transposed: bool) -> Tensor:
    """The gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
    return x_NI.T.mm(gradient_NO) if is_transposed else gradient_NO.T.mm(x_NI)


def _weight_gradient_now(x_NI: Tensor, gradient_NO: Tensor, is_transposed: bool) -> Callable[[], Tensor]:
    gradient = weight_gradient(x_NI, gradient_NO, is_transposed)
    return lambda: gradient


class _HoldingLinear(nn.Linear):
    weight_gradients: WeightGradients

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, weight_gradients=self.weight_gradients)


class _HoldingConv1D(Conv1D):
    weight_gradients: WeightGradients

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, weight_gradients=self.weight_gradients, is_transposed=True)


_HOLDING = {nn.Linear: _HoldingLinear, Conv1D: _HoldingConv1D}


def hold_weight_gradients(model: nn.Module) -> WeightGradients:
    """Let a model's linear layers hold back their weight gradients when asked to.

    Plain linear layers change their class for a subclass of it. A parallel layer has an attribute
    `weight_gradients` that it hands to `linear`. Whatever else holds a weight computes its gradient at once.
    """
    store = WeightGradients()
    for module in model.modules():
        if (holding := _HOLDING.get(type(module))) is not None:
            module.__class__ = holding
        elif not hasattr(module, "weight_gradients"):
            continue
        module.weight_gradients = store  # type: ignore[assignment]
    return store
