"""Backward in two parts: input gradients now, weight gradients of linear layers later. When is the schedule's.

A linear layer computes two products in backward. The one that gives its input's gradient is what the stages
before wait for; the one that gives its weight's can wait until nothing else is to be done (arXiv:2401.10241,
section 2). Everything else that has a gradient (norms, embeddings, biases) is cheap, and gets it in the first
part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ..cluster.hooks import has_foreign_hooks

# N rows of all other dimensions together, I input features, O output features


class _Held(NamedTuple):
    """What a weight's gradient is made of."""

    parameter: Parameter
    x_NI: Tensor
    gradient_NO: Tensor
    is_transposed: bool


class WeightGradients:
    """Weight gradients that backwards held back, by stage and microbatch; one per rank."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], list[_Held]] = {}
        self._holding: list[_Held] | None = None

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
            torch.autograd.backward(
                [each.parameter for each in held],
                [_weight_gradient(each.x_NI, each.gradient_NO, each.is_transposed) for each in held],
            )

    def forget(self) -> None:
        """Drop all that is held, after a step that broke off."""
        self._by_place.clear()

    def take(
        self, parameter: Parameter, x_NI: Tensor, gradient_NO: Tensor, is_transposed: bool
    ) -> Tensor | None:
        """A weight's gradient, or None where it is held back. One that somebody has hooks for never is."""
        if self._holding is None or has_foreign_hooks(parameter):
            return _weight_gradient(x_NI, gradient_NO, is_transposed)
        self._holding.append(_Held(parameter, x_NI, gradient_NO, is_transposed))
        return None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    weight_gradients: WeightGradients | None,
    is_transposed: bool = False,
) -> Tensor:
    """A linear layer whose weight gradient may be held back.

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        weight_gradients: where it is held; None where no schedule splits backwards.

    Returns:
        (..., O).
    """
    if weight_gradients is None or not weight.requires_grad or not torch.is_grad_enabled():
        return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)
    out: Tensor = _SplitLinear.apply(x, weight, bias, weight_gradients, is_transposed)
    return out


class _SplitLinear(Function):
    """The products of backward are those that autograd makes of a linear layer: equal to the bit."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradients, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.store, ctx.is_transposed = weight, store, is_transposed
        return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if needs_input:
            of_input = gradient_NO.mm(weight.T if ctx.is_transposed else weight).view(x.shape)
        if needs_bias:
            of_bias = gradient_NO.sum(0)
        of_weight = ctx.store.take(ctx.parameter, x.reshape(-1, x.shape[-1]), gradient_NO, ctx.is_transposed)
        return of_input, of_weight, of_bias, None, None


def _weight_gradient(x_NI: Tensor, gradient_NO: Tensor, is_transposed: bool) -> Tensor:
    return x_NI.T.mm(gradient_NO) if is_transposed else gradient_NO.T.mm(x_NI)


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
