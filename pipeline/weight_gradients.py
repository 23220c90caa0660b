"""The queue of weight gradients that a schedule computes later than the rest of a backward.

A linear layer computes two products in backward. Previous stages wait for its input's gradient; its weight's can be
computed when nothing else is to be done (zero bubble, arXiv:2401.10241, section 2). Everything else that has a gradient
(norms, embeddings, biases) is cheap, and is never deferred. The layers themselves are shardformer/layers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.collectives import InFlight
from ..cluster.hooks import has_foreign_hooks

# N rows of all other dimensions together, or rows that are looked up; R, C rows and columns of a weight

Factors = tuple[Tensor, Tensor]


class GradientOwner(Protocol):
    """Memory in which gradients accumulate."""

    def takes(self, parameter: Parameter) -> bool:
        """Whether the backward that is running is one that adds to this parameter's gradient."""
        ...

    def add_rows(self, parameter: Parameter, rows_N: Tensor, values_NC: Tensor) -> None:
        """Add to rows of the parameter's gradient, as autograd adds a whole one."""
        ...

    def add_product(self, parameter: Parameter, left_RN: Tensor, right_NC: Tensor) -> None:
        """Add a product to the parameter's gradient, as autograd adds one that was made first."""
        ...

    def note(self, parameter: Parameter) -> None:
        """Outside of autograd: the parameter's gradient of this backward is complete."""
        ...


class Owner:
    """Whom to ask for a `GradientOwner`: nobody once it is gone, since a model may outlive its optimizer.

    A copy of it, within this process or in a file, belongs to another model and asks nobody.
    """

    def __init__(self, owner: GradientOwner | None = None) -> None:
        self._owner = None if owner is None else ref(owner)

    def __call__(self) -> GradientOwner | None:
        return None if self._owner is None else self._owner()

    def of(self, parameter: Parameter) -> GradientOwner | None:
        """The owner, where it takes this parameter's gradient now."""
        owner = self()
        return owner if owner is not None and owner.takes(parameter) else None

    def __reduce__(self) -> tuple[type["Owner"], tuple[()]]:
        return Owner, ()


class DeferredGradient(NamedTuple):
    """A weight's gradient that is computed later.

    Args:
        parameter: the weight, or this rank's piece of it.
        begin: begins to compute the gradient.
        backward: autograd's number of the backward that it belongs to.
        factors: of the product that it is, where it is no more than that.
        owner: of the parameter's gradient, where such a product may be added to it.
    """

    parameter: Parameter
    begin: Callable[[], InFlight[Tensor]]
    backward: int
    factors: Callable[[], Factors] | None = None
    owner: Owner | None = None

    def added(self) -> GradientOwner | None:
        """Add it to the memory of its owner; returns the owner if there is one."""
        if self.factors is None or self.owner is None or (owner := self.owner.of(self.parameter)) is None:
            return None
        owner.add_product(self.parameter, *self.factors())
        return owner


class WeightGradients:
    """Deferred weight gradients by stage and microbatch; one per rank."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], list[DeferredGradient]] = {}
        self._deferring: list[DeferredGradient] | None = None

    @contextmanager
    def deferring(self, place: tuple[int, int]) -> Iterator[None]:
        """Defer the weight gradients of backwards inside, under this stage and microbatch."""
        self._deferring = self._by_place[place] = []
        try:
            yield
        finally:
            self._deferring = None

    def compute(self, place: tuple[int, int]) -> None:
        """Compute deferred gradients, and give them to the parameters as a backward would, hooks included."""
        deferred = self._by_place.pop(place)
        with torch.no_grad():
            left = _left_to_autograd(deferred)
            gradients = list(_each_beside_the_next(left))
        if left:
            torch.autograd.backward([each.parameter for each in left], gradients)

    @property
    def is_deferring(self) -> bool:
        """Whether backwards are to defer weight gradients now."""
        return self._deferring is not None

    def forget(self) -> None:
        """Drop all deferred gradients, after a step that broke off."""
        self._by_place.clear()

    def defer(self, gradient: DeferredGradient) -> bool:
        """Defer this, where that is asked for now. A weight that has hooks of a user never is."""
        if self._deferring is None or has_foreign_hooks(gradient.parameter):
            return False
        self._deferring.append(gradient)
        return True


def _left_to_autograd(deferred: Sequence[DeferredGradient]) -> list[DeferredGradient]:
    """Add gradients to the memory of their owners; return the ones that have none."""
    left: list[DeferredGradient] = []
    left_of = Counter(each.parameter for each in deferred)
    for each in deferred:
        owner = each.added()
        if owner is None:
            left.append(each)
            continue
        left_of[each.parameter] -= 1
        if not left_of[each.parameter]:
            owner.note(each.parameter)
    return left


def _each_beside_the_next(deferred: Iterable[DeferredGradient]) -> Iterator[Tensor]:
    """The gradients; each is in flight until the next has begun too."""
    in_flight: InFlight[Tensor] | None = None
    for each in deferred:
        begun = each.begin()
        if in_flight is not None:
            yield in_flight.wait()
        in_flight = begun
    if in_flight is not None:
        yield in_flight.wait()
