"""Backward in two parts: input gradients now, weight gradients of linear layers later. When is the schedule's.

A linear layer computes two products in backward. The one that gives its input's gradient is what the stages
before wait for; the one that gives its weight's can wait until nothing else is to be done (arXiv:2401.10241,
section 2). Everything else that has a gradient (norms, embeddings, biases) is cheap, and gets it in the first
part.

Within one backward a layer's weight gradient may wait too, for the sum of input gradients over ranks to begin
(`LaterProduct`; cluster/collectives.py, `copy_beside`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from ..cluster.gradient_owner import GradientOwner, Owner
from ..cluster.hooks import has_foreign_hooks

# N rows of all other dimensions together, I input features, O output features

Factors = tuple[Tensor, Tensor]


class HeldGradient(NamedTuple):
    """A weight's gradient that waits.

    Args:
        parameter: the weight, or this rank's piece of it.
        begin: computes the gradient, or begins to; what it returns gives it.
        backward: autograd's number of the one that it is of.
        factors: whose product it is, where it is no more than that.
        owner: of the parameter's gradient, where such a product may be added to it.
    """

    parameter: Parameter
    begin: Callable[[], Callable[[], Tensor]]
    backward: int
    factors: Callable[[], Factors] | None = None
    owner: Owner | None = None

    def added(self) -> GradientOwner | None:
        """Add it to what its owner has; returns the owner if it did."""
        if self.factors is None or self.owner is None or (owner := self.owner.of(self.parameter)) is None:
            return None
        owner.add_product(self.parameter, *self.factors())
        return owner


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
        with torch.no_grad():
            left = _left_to_autograd(held)
            gradients = list(_each_beside_the_next(left))
        if left:
            torch.autograd.backward([each.parameter for each in left], gradients)

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


def _left_to_autograd(held: Sequence[HeldGradient]) -> list[HeldGradient]:
    """Those that could not be added to their owners' memory at once."""
    left: list[HeldGradient] = []
    to_come = Counter(each.parameter for each in held)
    for each in held:
        owner = each.added()
        if owner is None:
            left.append(each)
            continue
        to_come[each.parameter] -= 1
        if not to_come[each.parameter]:
            owner.note(each.parameter)
    return left


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
            if held.backward == torch._C._current_graph_task_id() and held.added() is None:
                product = held.begin()()
                gradient = product if gradient is None else gradient + product
        return gradient, None
