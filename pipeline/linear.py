"""Linear layers whose weight gradients may wait, and are added to where gradients accumulate as they are made.

Waiting is split_backward.py. Where that memory has an owner who takes them (cluster/gradient_owner.py) they are added
to it; autograd would make each whole, and read it again to add it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ..cluster.gradient_owner import Owner, is_transformed
from .split_backward import Factors, HeldGradient, LaterProduct, WeightGradients

# N rows of all other dimensions together, I input features, O output features


class KeptInput(Protocol):
    """How a layer's input is had again in backward, of which something smaller is kept."""

    def use(self) -> None:
        """Say in forward that one more layer will ask for it."""
        ...

    def begin(self, kept: Tensor) -> None:
        """Begin to make it of what was kept, if that can be done while something else is computed."""
        ...

    def rows(self, kept: Tensor) -> Tensor:
        """The input (N, I)."""
        ...


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    weight_gradients: WeightGradients | None,
    owner: Owner | None = None,
    is_transposed: bool = False,
    later: LaterProduct | None = None,
    kept: tuple[Tensor, KeptInput] | None = None,
    ready: list[Tensor] | None = None,
) -> Tensor:
    """A linear layer whose weight gradient may be held back.

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        weight_gradients: where it is held; None where no schedule splits backwards.
        owner: of the weight's gradient; None leaves it to autograd.
        later: of this weight, for when its gradient is not held back that long.
        kept: what is kept for backward in place of `x`, and how `x` is had again; where autograd is left to itself
            `x` is kept.
        ready: the result, where it was computed before (`can_be_ready`). It is taken out.

    Returns:
        (..., O).
    """
    if not torch.is_grad_enabled():
        return ready.pop() if ready else _product(x, weight, bias, is_transposed)
    is_at_once = weight_gradients is None and later is None and kept is None and not ready
    if (is_at_once and owner is None) or not _is_own(x, weight):
        return _product(x, weight, bias, is_transposed)
    if is_at_once:
        own: Tensor = _OwnedLinear.apply(x, weight, bias, owner, is_transposed)
        return own
    part, again = (None, None) if kept is None else kept
    keep = Keep(
        parameter=cast(Parameter, weight),
        is_transposed=is_transposed,
        store=weight_gradients,
        owner=owner,
        later=later,
        again=again,
    )
    through = weight if later is None else later.weight
    out: Tensor = _SplitLinear.apply(x, through, bias, keep, part, ready)
    return out


def can_be_ready(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` takes a result that was computed before."""
    is_autocast = torch.is_autocast_enabled(x.device.type)
    return not is_autocast if not torch.is_grad_enabled() else _is_own(x, weight)


def _is_own(x: Tensor, weight: Tensor) -> bool:
    # A weight that is computed from others (weight_norm, pruning) has a graph that backward runs through once; under
    # autocast products are of other formats than what they are made of.
    is_trained = weight.is_leaf and weight.requires_grad
    return is_trained and not torch.is_autocast_enabled(x.device.type) and not is_transformed()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A linear layer's weight, where its gradient may wait, and who owns that."""

    parameter: Parameter
    is_transposed: bool
    store: WeightGradients | None
    owner: Owner | None = None
    later: LaterProduct | None = None
    again: KeptInput | None = None

    def begin(self, kept: Tensor) -> None:
        """Begin to have the input again, where its rows are wanted in this backward."""
        if self.again is not None and not (self.store is not None and self.store.is_holding):
            self.again.begin(kept)

    def gradient(self, kept: Tensor, gradient_NO: Tensor) -> Tensor | None:
        """The weight's gradient, or None where it waits.

        Args:
            kept: the input (..., I), or what was kept of it.
            gradient_NO: of the output.
        """

        def factors() -> Factors:
            x_NI = kept.reshape(-1, kept.shape[-1]) if self.again is None else self.again.rows(kept)
            return _factors(x_NI, gradient_NO, is_transposed=self.is_transposed)

        def begin() -> Callable[[], Tensor]:
            product = torch.mm(*factors())
            return lambda: product

        backward = torch._C._current_graph_task_id()
        held = HeldGradient(self.parameter, begin, backward, factors, self.owner)
        if self.store is not None and self.store.takes(held):
            return None
        if self.later is None:
            return None if held.added() is not None else begin()()
        self.later.put(held)
        return None


class _SplitLinear(Function):
    """The products of backward are those that autograd makes of a linear layer: equal to the bit."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keep: Keep,
        part: Tensor | None,
        ready: list[Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(x if part is None else part, weight)
        ctx.keep = keep
        if keep.again is not None:
            keep.again.use()
        out = ready.pop() if ready else _product(x, weight, bias, keep.is_transposed)
        return torch.ops.aten._unsafe_view(out, out.shape)  # or what follows could not write to it in place

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        kept, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        ctx.keep.begin(kept)
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_bias = None
        if needs_input:
            of_input = gradient_NO.mm(weight.T if ctx.keep.is_transposed else weight)
            of_input = of_input.view(*gradient.shape[:-1], of_input.shape[-1])
        if needs_bias:
            of_bias = gradient_NO.sum(0)
        return of_input, ctx.keep.gradient(kept, gradient_NO), of_bias, None, None, None


class _OwnedLinear(Function):
    """A linear layer whose weight gradient is added at once, unless a gradient of gradients is wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Tensor | None, owner: Owner, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.owner, ctx.is_transposed = weight, owner, is_transposed
        out = _product(x, weight, bias, is_transposed)
        return torch.ops.aten._unsafe_view(out, out.shape)  # or what follows could not write to it in place

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = None
        if needs_input:
            of_input = gradient_NO.mm(weight.T if ctx.is_transposed else weight)
            of_input = of_input.view(*gradient.shape[:-1], of_input.shape[-1])
        factors = _factors(x.reshape(-1, x.shape[-1]), gradient_NO, is_transposed=ctx.is_transposed)
        owner = None if torch.is_grad_enabled() else ctx.owner.of(ctx.weight)
        if owner is None:
            of_weight = torch.mm(*factors)
        else:
            owner.add_product(ctx.weight, *factors)
        return of_input, of_weight, gradient_NO.sum(0) if needs_bias else None, None, None


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Tensor:
    """The gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
    return torch.mm(*_factors(x_NI, gradient_NO, is_transposed=is_transposed))


def _factors(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Factors:
    return (x_NI.T, gradient_NO) if is_transposed else (gradient_NO.T, x_NI)


class _OwnLinear(nn.Linear):
    weight_gradients: WeightGradients | None = None
    gradient_owner: Owner | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(
            x, self.weight, self.bias, weight_gradients=self.weight_gradients, owner=self.gradient_owner
        )


class _OwnConv1D(Conv1D):
    weight_gradients: WeightGradients | None = None
    gradient_owner: Owner | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(
            x,
            self.weight,
            self.bias,
            weight_gradients=self.weight_gradients,
            owner=self.gradient_owner,
            is_transposed=True,
        )


_OWN = {nn.Linear: _OwnLinear, Conv1D: _OwnConv1D}


def own_linear_layers(model: nn.Module) -> None:
    """Let a model's linear layers compute their weight gradients through `linear`.

    Plain ones change their class for a subclass of it, with the attributes `weight_gradients` and `gradient_owner` that
    parallel layers have too, and hand to it. Whatever else holds a weight leaves its gradient to autograd.
    """
    for module in model.modules():
        if (own := _OWN.get(type(module))) is not None:  # some stand-ins let nobody set their class
            module.__class__ = own


def hold_weight_gradients(model: nn.Module) -> WeightGradients:
    """Let a model's linear layers, plain or parallel, hold back their weight gradients when asked to."""
    own_linear_layers(model)
    store = WeightGradients()
    for module in model.modules():
        if hasattr(module, "weight_gradients"):
            module.weight_gradients = store  # type: ignore[assignment]
    return store
