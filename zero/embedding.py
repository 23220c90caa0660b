"""An embedding's gradient, added to the bucket row by row.

In every backward autograd makes of an embedding a gradient as large as the whole table: zeros but for the rows
that the microbatch looked up. It is filled, and read again to be added to what is there. Here only those rows are
added. Each is summed over the microbatch first, as autograd does, so that the result is equal to the bit.
"""

from collections import Counter
from typing import Any, Protocol
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

# N entries that are looked up, V rows of the table, H hidden


class RowGradients(Protocol):
    """Who owns gradients that rows can be added to."""

    def takes_rows(self, parameter: Parameter) -> bool:
        """Whether the backward that is running is one that adds to this parameter's gradient."""
        ...

    def add_rows(self, parameter: Parameter, rows_N: Tensor, values_NH: Tensor) -> None:
        """Add to rows of the parameter's gradient, as autograd adds a whole one."""
        ...


class Owner:
    """Whom to ask for a `RowGradients`: nobody once it is gone, since a model may outlive its optimizer.

    A copy of it, within this process or in a file, belongs to another model and asks nobody.
    """

    def __init__(self, owner: RowGradients | None = None) -> None:
        self._owner = None if owner is None else ref(owner)

    def __call__(self) -> RowGradients | None:
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[type["Owner"], tuple[()]]:
        return Owner, ()


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, *, row_gradients: Owner | None) -> Tensor:
    """`torch.nn.functional.embedding`, whose backward adds rows where they are taken.

    Args:
        ids: which rows, in any shape.
        weight: (V, H).
        padding_idx: a row that gets no gradient, counted from 0.
        row_gradients: who owns the weight's gradient; None leaves it to autograd.

    Returns:
        (*ids.shape, H).
    """
    # As many entries as the table has rows win nothing. A weight that is computed from others has a graph.
    is_own = isinstance(weight, Parameter) and weight.requires_grad and torch.is_grad_enabled()
    is_transformed = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    is_taken = is_own and not is_transformed and ids.numel() < weight.shape[0]
    if row_gradients is None or row_gradients() is None or not is_taken:
        return F.embedding(ids, weight, padding_idx)
    out: Tensor = _RowEmbedding.apply(ids, weight, padding_idx, row_gradients)
    return out


class _RowEmbedding(Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Parameter, padding_idx: int | None, row_gradients: Owner
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.row_gradients = weight, row_gradients
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        parameter, owner = ctx.parameter, ctx.row_gradients()
        if owner is None or torch.is_grad_enabled() or not owner.takes_rows(parameter):
            num_rows = parameter.shape[0]
            whole = torch.ops.aten.embedding_dense_backward(gradient, ids, num_rows, ctx.padding_idx, False)
            return None, whole, None, None
        if ids.numel():
            owner.add_rows(parameter, *summed_by_row(ids.flatten().long(), gradient, ctx.padding_idx))
        return None, None, None, None


def summed_by_row(ids_N: Tensor, gradient: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The rows that were looked up, and the sum of each one's gradients, in the order in which autograd sums.

    The host does not wait for the device: there are as many results as entries, and those left over are zeros
    for row 0.

    Args:
        ids_N: int64, at least one: which row each gradient belongs to.
        gradient: (..., H), N × H elements.
        padding_idx: a row that gets zeros; -1 for none.

    Returns:
        rows (N), values (N, H).
    """
    count = ids_N.numel()
    sorted_N, order_N = ids_N.sort()
    is_new_N = torch.ones_like(sorted_N)
    is_new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    place_N = is_new_N.cumsum(0) - 1
    rows_N = torch.zeros_like(ids_N).scatter_(0, place_N, sorted_N)
    places_N = torch.empty_like(ids_N).scatter_(0, order_N, place_N)
    values_NH = torch.ops.aten.embedding_dense_backward(
        gradient.reshape(count, -1), places_N, count, -1, False
    )
    if padding_idx >= 0:
        values_NH = values_NH.masked_fill_((rows_N == padding_idx).unsqueeze(1), 0.0)
    return rows_N, values_NH


def needs_all_uses(module: nn.Embedding) -> bool:
    """Whether what an embedding does to a row, or to its gradient, depends on all uses of it in a batch."""
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


class _RowwiseEmbedding(nn.Embedding):
    row_gradients: Owner | None

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx, row_gradients=self.row_gradients)


def add_gradients_by_row(model: nn.Module, owner: RowGradients) -> None:
    """Let a model's embeddings add their gradients row by row.

    Plain embeddings change their class for a subclass of it. A parallel one has an attribute `row_gradients` that
    it hands to `embedding`. A table that several modules use is left to autograd, which sums over its uses before
    it adds to what is there.
    """
    uses = Counter(weight for module in model.modules() for weight in module._parameters.values())
    for module in model.modules():
        if type(module) is nn.Embedding and not needs_all_uses(module):
            module.__class__ = _RowwiseEmbedding
        elif not hasattr(module, "row_gradients"):
            continue
        is_used_once = uses[module.weight] == 1  # type: ignore[index]
        module.row_gradients = Owner(owner) if is_used_once else None  # type: ignore[assignment]
