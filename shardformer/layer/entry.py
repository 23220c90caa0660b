"""Where whole inputs enter layers that are split by columns: their gradients are partial, and summed in backward."""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ...cluster.collectives import copy_beside
from ...cluster.gradient_owner import Owner
from ...pipeline.linear import can_be_ready, linear
from ...pipeline.split_backward import LaterProduct, WeightGradients
from ..sequence.regather import Regather
from ..sequence.regions import RegionSequence, enter_beside
from ..sequence.ring_products import gather_beside_product
from .parallel_module import ParallelModule


class _Given(NamedTuple):
    """What a region's entry tells a layer of the tensor that it is about to be called with."""

    whole: ref[Tensor]
    version: int
    kept: tuple[Tensor, Regather] | None  # what is kept of it for backward, where that is less
    ready: list[Tensor]  # the product, where it was computed while the tensor was gathered
    bias: Tensor | None  # that is in it

    def is_about(self, x: Tensor) -> bool:
        """Whether this is that tensor, as it was."""
        return self.whole() is x and x._version == self.version

    def is_product_with(self, bias: Tensor | None) -> bool:
        """Whether what is ready, if it is, is what the layer is to make; it may be asked to leave its bias away."""
        return not self.ready or bias is self.bias


class ProductLayer(ParallelModule):
    """A parallel layer that multiplies by its weight, whose gradient may wait."""

    group: dist.ProcessGroup
    weight: Parameter
    bias: Parameter | None
    output_dim = 0  # nn.Linear holds (O, I)
    weight_gradients: WeightGradients | None = None  # where backward holds them back, see split_backward.py
    gradient_owner: Owner | None = None  # who adds them to what is there
    # Whether a region's input reaches this layer as it is, as far as is known: see `_early`.
    takes_entered = True
    _later: LaterProduct | None = None
    _given: _Given | None = None

    def compute_gradient_later(self) -> None:
        """Of the next call: let autograd compute the weight's gradient after all that is computed from here on."""
        is_needed = torch.is_grad_enabled() and self.weight.is_leaf and self.weight.requires_grad
        self._later = LaterProduct(self.weight) if is_needed else None

    def expect(self, given: _Given) -> None:
        """Be told of the tensor of the next call."""
        self.takes_entered &= self._given is None  # else it was not called
        self._given = given

    def product_of(self, x: Tensor) -> Tensor:
        """What the layer makes of its input, for `linear` to take as it is; no gradient."""
        weight = self.weight.T if self.output_dim == 1 else self.weight
        return torch.nn.functional.linear(x, weight, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        later, self._later = self._later, None
        given, self._given = self._given, None
        if given is not None and not (given.is_about(x) and given.is_product_with(bias)):
            self.takes_entered, given = False, None
        return linear(
            x,
            self.weight,
            bias,
            weight_gradients=self.weight_gradients,
            owner=self.gradient_owner,
            is_transposed=self.output_dim == 1,
            later=later,
            kept=None if given is None else given.kept,
            ready=None if given is None else given.ready,
        )


def enter(
    xs: Sequence[Tensor],
    group: dist.ProcessGroup,
    layers: Sequence[ProductLayer],
    sequence: RegionSequence | None = None,
) -> list[Tensor]:
    """Let inputs pass `copy_to`: nothing in forward, an all-reduce in backward.

    While it is under way backward computes the weight gradients of the layers (arXiv:1909.08053, section 3, has the
    all-reduce alone).

    Args:
        xs: replicated inputs.
        group: the tensor axis.
        layers: those that multiply with them.
        sequence: the first input is a part of a sequence, which is gathered: an all-gather in forward, a
            reduce-scatter in backward.
    """

    def hold_back() -> None:
        for layer in layers:
            layer.compute_gradient_later()

    if sequence is None:
        return copy_beside(xs, group, hold_back)
    early = _early(layers, xs[0]) if sequence.style == "ring" else None
    ready: list[Tensor] = []

    def gather(part: Tensor, length: int) -> Tensor:
        if sequence.style != "ring":
            return sequence.begin_whole(part, length)()
        whole, made = gather_beside_product(part, sequence, length, early and early.product_of)
        if made is not None:
            ready.append(made if xs[0].ndim == part.ndim else made.flatten(0, 1))
        return whole

    others: list[Tensor] = []
    first = enter_beside(
        xs[0], sequence, gather, lambda: others.extend(copy_beside(xs[1:], group, hold_back))
    )
    kept = _kept(xs[0], sequence) if sequence.style == "regather" else None
    for layer in layers:
        layer.expect(_Given(ref(first), first._version, kept, ready if layer is early else [], layer.bias))
    return [first, *others]


def _early(layers: Sequence[ProductLayer], x: Tensor) -> ProductLayer | None:
    """The first layer whose product may be computed while its input is gathered, before the region's own code runs.

    That code may hand a layer something else (in cross attention the other states, to keys; latents): what was computed
    is dropped then, and the layer is passed over from there on.
    """
    fitting = (
        layer
        for layer in layers
        if layer.takes_entered and layer.weight.shape[1 - layer.output_dim] == x.shape[-1]
    )
    return next((layer for layer in fitting if can_be_ready(x, layer.weight)), None)


def _kept(part: Tensor, sequence: RegionSequence) -> tuple[Tensor, Regather]:
    """What is kept of a region's input for backward, and how that is had again."""
    by_sample = part if part.ndim > 2 else part.unflatten(0, (-1, sequence.axis.part_length))
    return by_sample.detach(), Regather(sequence, sequence.axis.length)
