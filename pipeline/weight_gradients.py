"""Queue of deferred weight gradients, which a schedule computes after the rest of a backward.

A linear layer computes two products in backward. Previous stages wait for the gradient of its input; the gradient of
its weight can be computed when the rank is idle (zero bubble, arXiv:2401.10241, section 2). All other gradients (norms,
embeddings, biases) are cheap and never deferred. The layers are in shardformer/layers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.collectives import InFlight
from ..cluster.hooks import has_foreign_hooks


class DeferredGradient(NamedTuple):
    """A deferred weight gradient.

    Args:
        parameter: the weight, or this rank's shard of it.
        begin: starts the computation of the gradient.
        backward_number: autograd's number of the backward that deferred the gradient.
    """

    parameter: Parameter
    begin: Callable[[], InFlight[Tensor]]
    backward_number: int


class WeightGradients:
    """Deferred weight gradients by stage and microbatch; one per rank."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], list[DeferredGradient]] = {}  # by stage and microbatch
        self._deferring: list[DeferredGradient] | None = None  # those of the running backward

    @contextmanager
    def deferring(self, place: tuple[int, int]) -> Iterator[None]:
        """Defer the weight gradients of backwards inside, under this stage and microbatch."""
        self._deferring = self._by_place[place] = []
        try:
            yield
        finally:
            self._deferring = None

    def compute(self, place: tuple[int, int]) -> None:
        """Compute the deferred gradients and accumulate them like a backward, with the parameters' hooks.

        Args:
            place: (stage, microbatch).
        """
        deferred_gradients = self._by_place.pop(place)
        with torch.no_grad():
            gradients = list(_computed(deferred_gradients))
        if deferred_gradients:
            torch.autograd.backward([deferred.parameter for deferred in deferred_gradients], gradients)

    @property
    def is_deferring(self) -> bool:
        """Return True if backwards currently defer weight gradients."""
        return self._deferring is not None

    def forget(self) -> None:
        """Drop all deferred gradients, after an interrupted step."""
        self._by_place.clear()

    def defer(self, gradient: DeferredGradient) -> bool:
        """Defer this gradient inside `deferring`, unless its weight has a user's hooks; return True if deferred."""
        if self._deferring is None or has_foreign_hooks(gradient.parameter):
            return False
        self._deferring.append(gradient)
        return True


def _computed(deferred_gradients: Iterable[DeferredGradient]) -> Iterator[Tensor]:
    """Yield the gradients in order; the communication of one overlaps the computation of the next."""
    previous: InFlight[Tensor] | None = None
    for deferred in deferred_gradients:
        current = deferred.begin()
        if previous is not None:
            yield previous.wait()
        previous = current
    if previous is not None:
        yield previous.wait()
