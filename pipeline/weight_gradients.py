"""Weight gradients of linear layers in a pipeline: deferred by a schedule, and added without a temporary.

A linear layer computes two products in backward. Previous stages wait for the gradient of its input; the gradient of
its weight can be computed when the rank is idle (zero bubble, arXiv:2401.10241, section 2). All other gradients (norms,
embeddings, biases) are cheap and never deferred. The layers are in shardformer/layers.

[Note: gradients added by their product] From the second microbatch of a step on, `parameter.grad` exists, and the
product of a weight's gradient is added to it by the kernel of the product (Megatron-LM calls this gradient accumulation
fusion). Autograd would write the product to new memory, read it again and add it. The optimizer must have begun to
accumulate before the step. Autograd then gets no gradient of the weight: hooks of the parameter get None, and a weight
with a user's hooks is left to autograd. On CUDA all this runs on the stream of the forward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.collectives import InFlight
from ..cluster.hooks import accumulates, has_foreign_hooks, report_added


class WeightGradient(NamedTuple):
    """A weight gradient that is not computed yet.

    Args:
        parameter: the weight, or this rank's shard of it.
        begin: starts the computation of the gradient.
        add_to: computes it and adds it to a tensor of the weight's shape, in place; None if it is communicated first.
        store: the weight gradients of the schedule; None where none has any.
        backward_number: autograd's number of the backward that it belongs to.
    """

    parameter: Parameter
    begin: Callable[[], InFlight[Tensor]]
    add_to: Callable[[Tensor], None] | None
    store: "WeightGradientQueue | None"
    backward_number: int

    def compute(self) -> Tensor | None:
        """Return the gradient for autograd; None if `parameter.grad` has it already."""
        return None if self.store is not None and self.store.add(self) else self.begin().wait()


class WeightGradientQueue:
    """The weight gradients of a rank's linear layers: deferred ones by stage and microbatch, others added at once."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], list[WeightGradient]] = {}  # by stage and microbatch
        self._deferring: list[WeightGradient] | None = None  # those of the running backward
        self._is_adding = False
        self._last_backward = -1  # autograd's number of the last backward that accumulated gradients

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Let a backward inside add products to `parameter.grad`; see [Note: gradients added by their product]."""
        self._is_adding = True
        try:
            yield
        finally:
            self._is_adding = False

    def add(self, gradient: WeightGradient) -> bool:
        """Add this gradient of a running backward to `parameter.grad`, if that may be; return True if it was added."""
        return self._is_adding and self._backward_accumulates(gradient) and _add(gradient)

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
            left = [deferred for deferred in deferred_gradients if not _add(deferred)]
            gradients: list[Tensor | None] = [*_computed(left)]
        if left:
            torch.autograd.backward([deferred.parameter for deferred in left], gradients)
        passed = {deferred.parameter for deferred in left}
        for parameter in dict.fromkeys(deferred.parameter for deferred in deferred_gradients):
            if parameter not in passed:  # a layer that ran twice has added both
                report_added(parameter)

    @property
    def is_deferring(self) -> bool:
        """Return True if backwards currently defer weight gradients."""
        return self._deferring is not None

    def forget(self) -> None:
        """Drop all deferred gradients, after an interrupted step."""
        self._by_place.clear()

    def defer(self, gradient: WeightGradient) -> bool:
        """Defer this gradient inside `deferring`, unless its weight has a user's hooks; return True if deferred."""
        if self._deferring is None or has_foreign_hooks(gradient.parameter):
            return False
        if not self._backward_accumulates(gradient):
            return False
        self._deferring.append(gradient)
        return True

    def _backward_accumulates(self, gradient: WeightGradient) -> bool:
        """Return True if the running backward accumulates gradients; that of autograd.grad in a function returns them.

        Asked once in a backward: if it accumulates one of the weights that it asks for, it accumulates them all.
        """
        if gradient.backward_number != self._last_backward:
            if not accumulates(gradient.parameter):
                return False
            self._last_backward = gradient.backward_number
        return True


def _add(gradient: WeightGradient) -> bool:
    """Add a gradient to `parameter.grad` by its product; return False if there is none, or hooks need the gradient."""
    total = gradient.parameter.grad
    if gradient.add_to is None or has_foreign_hooks(gradient.parameter):
        return False
    # A subclass is the placeholder of a sharded gradient.
    if type(total) is not Tensor or total.layout is not torch.strided:
        return False
    gradient.add_to(total)
    return True


def _computed(deferred_gradients: Iterable[WeightGradient]) -> Iterator[Tensor]:
    """Yield the gradients in order; the communication of one overlaps the computation of the next."""
    previous: InFlight[Tensor] | None = None
    for deferred in deferred_gradients:
        current = deferred.begin()
        if previous is not None:
            yield previous.wait()
        previous = current
    if previous is not None:
        yield previous.wait()
