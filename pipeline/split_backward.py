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
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

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

    @property
    def is_holding(self) -> bool:
        """Whether backwards are asked to hold back now."""
        return self._holding is not None

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
    kept: tuple[Tensor, KeptInput] | None = None,
    ready: list[Tensor] | None = None,
) -> Tensor:
    """A linear layer whose weight gradient may be held back.

    Args:
        x: (..., I).
        weight: (O, I), or (I, O) with `is_transposed`.
        bias: (O) or None.
        weight_gradients: where it is held; None where no schedule splits backwards.
        later: of this weight, for when its gradient is not held back that long.
        kept: what is kept for backward in place of `x`, and how `x` is had again; where autograd is left to itself
            `x` is kept.
        ready: the result, where it was computed before (`can_be_ready`). It is taken out.

    Returns:
        (..., O).
    """
    if not torch.is_grad_enabled():
        return ready.pop() if ready else _product(x, weight, bias, is_transposed)
    is_plain = weight_gradients is None and later is None and kept is None and not ready
    if is_plain or not _is_own(x, weight):
        return _product(x, weight, bias, is_transposed)
    part, again = (None, None) if kept is None else kept
    keep = Keep(
        parameter=cast(Parameter, weight),
        is_transposed=is_transposed,
        store=weight_gradients,
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
    return weight.is_leaf and weight.requires_grad and not torch.is_autocast_enabled(x.device.type)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    return torch.nn.functional.linear(x, weight.T if is_transposed else weight, bias)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A linear layer's weight, and where its gradient may wait."""

    parameter: Parameter
    is_transposed: bool
    store: WeightGradients | None
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

        def begin() -> Callable[[], Tensor]:
            x_NI = kept.reshape(-1, kept.shape[-1]) if self.again is None else self.again.rows(kept)
            product = weight_gradient(x_NI, gradient_NO, is_transposed=self.is_transposed)
            return lambda: product

        held = HeldGradient(self.parameter, begin, torch._C._current_graph_task_id())
        if self.store is not None and self.store.takes(held):
            return None
        if self.later is None:
            return begin()()
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


def weight_gradient(x_NI: Tensor, gradient_NO: Tensor, *, is_transposed: bool) -> Tensor:
    """The gradient of a linear layer's weight, (O, I), or (I, O) with `is_transposed`."""
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
