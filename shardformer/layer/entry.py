"""Where whole inputs enter layers that are split by columns: their gradients are partial, and summed in backward."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ...cluster.collectives import copy_beside
from ...pipeline.split_backward import LaterProduct, WeightGradients, linear
from ..sequence.regions import RegionSequence, enter_beside
from .parallel_module import ParallelModule


class ProductLayer(ParallelModule):
    """A parallel layer that multiplies by its weight, whose gradient may wait."""

    group: dist.ProcessGroup
    weight: Parameter
    bias: Parameter | None
    output_dim = 0  # nn.Linear holds (O, I)
    weight_gradients: WeightGradients | None = None  # where backward holds them back, see split_backward.py
    _later: LaterProduct | None = None

    def compute_gradient_later(self) -> None:
        """Of the next call: let autograd compute the weight's gradient after all that is computed from here on."""
        is_needed = torch.is_grad_enabled() and self.weight.is_leaf and self.weight.requires_grad
        self._later = LaterProduct(self.weight) if is_needed else None

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        later, self._later = self._later, None
        return linear(
            x,
            self.weight,
            bias,
            weight_gradients=self.weight_gradients,
            is_transposed=self.output_dim == 1,
            later=later,
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
    others: list[Tensor] = []
    first = enter_beside(xs[0], sequence, lambda: others.extend(copy_beside(xs[1:], group, hold_back)))
    return [first, *others]
