"""An embedding's gradient, added to the bucket row by row.

In every backward autograd makes of an embedding a gradient as large as the whole table: zeros but for the rows
that the microbatch looked up. It is filled, and read again to be added to what is there. Here only those rows are
added. Each is summed over the microbatch first, as autograd does, so that the result is equal to the bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ..cluster.gradient_owner import Owner, is_transformed

# N entries that are looked up, V rows of the table, H hidden


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, *, owner: Owner | None) -> Tensor:
    """`torch.nn.functional.embedding`, whose backward adds rows where they are taken.

    Args:
        ids: which rows, in any shape.
        weight: (V, H).
        padding_idx: a row that gets no gradient, counted from 0.
        owner: of the weight's gradient; None leaves it to autograd.

    Returns:
        (*ids.shape, H).
    """
    # As many entries as the table has rows win nothing. A weight that is computed from others has a graph.
    is_own = isinstance(weight, Parameter) and weight.requires_grad and torch.is_grad_enabled()
    is_taken = is_own and not is_transformed() and ids.numel() < weight.shape[0]
    if owner is None or owner() is None or not is_taken:
        return F.embedding(ids, weight, padding_idx)
    out: Tensor = _RowEmbedding.apply(ids, weight, padding_idx, owner)
    return out


class _RowEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Parameter, padding_idx: int | None, owner: Owner) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.owner = weight, owner
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        parameter = ctx.parameter
        owner = None if torch.is_grad_enabled() else ctx.owner.of(parameter)
        if owner is None:
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
    gradient_owner: Owner | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx, owner=self.gradient_owner)


def own_embeddings(model: nn.Module) -> None:
    """Let a model's embeddings look up their rows through `embedding`.

    Plain ones change their class for a subclass of it, with an attribute `gradient_owner` that parallel ones have too.
    """
    for module in model.modules():
        if type(module) is nn.Embedding and not needs_all_uses(module):
            module.__class__ = _RowwiseEmbedding
