"""Attention to the keys of one rank by torch's FlexAttention, which evaluates mask functions in its kernel.

The non-empty blocks of 128 queries and keys are found on the device, once per mask and rank, for all layers, forward
and backward. There is no host read.

[Note: gradients of a part of the keys] torch computes gradients from the results and the lse of one call, not from the
lse over all keys. Let O and L be the output and lse over all keys, o and l those over a part of them. O is the sum of
o · exp(l − L), so the gradient of o is exp(l − L) · dO, and that of l is exp(l − L) · (dO · (o − O)). So backward
recomputes o, which a dedicated kernel would not need: 7 matrix products instead of flash attention's 5.
"""

from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from ...cluster.device import is_cuda
from .block_mask import BlockMask

# B batch, N query heads, M key and value heads, Q queries, K keys, D head dim

_BLOCK = 128  # queries and keys per block: torch's default
_ENTRIES = 2**26  # entries of a mask that are materialized at a time
_LEAST_WIDTH = 16  # smallest head dim of the kernel


def fits(q: Tensor, v: Tensor) -> bool:
    """Return True if FlexAttention can train on such tensors: only on CUDA."""
    return is_cuda(q.device) and min(q.shape[-1], v.shape[-1]) >= _LEAST_WIDTH and _has_triton()


@cache
def _has_triton() -> bool:
    """Return True if Triton is installed, which compiles FlexAttention's kernels."""
    return find_spec("triton") is not None


def flex_mask(mask: BlockMask, queries: Tensor, keys: Tensor) -> FlexMask:
    """Return a FlexAttention mask for queries and keys at these positions; those beyond the sequence are padding."""
    visible_at = mask.at_positions(queries, keys)
    num_rows = max(1, _ENTRIES // (_BLOCK * len(keys))) * _BLOCK
    all_keys = torch.arange(len(keys), device=keys.device)
    all_queries = torch.arange(len(queries), device=queries.device)
    counts = torch.cat(
        [_count_blocks(mask.evaluate(visible_at, chunk, all_keys)) for chunk in all_queries.split(num_rows)],
        -2,
    )
    is_full = counts == _BLOCK**2
    return FlexMask.from_kv_blocks(
        *_as_block_lists((counts > 0) & ~is_full),
        *_as_block_lists(is_full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible_at,
        seq_lengths=(len(queries), len(keys)),
    )


def _count_blocks(seen: Tensor) -> Tensor:
    """Count the visible keys of each block: (B, 1, Q / 128, K / 128) of (B, 1, Q, K)."""
    num_queries, num_keys = seen.shape[-2:]
    padded = torch.nn.functional.pad(seen, (0, -num_keys % _BLOCK, 0, -num_queries % _BLOCK))
    blocks = padded.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))
    return blocks.sum((-3, -1), dtype=torch.int32)


def _as_block_lists(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a mask of blocks (B, 1, Q / 128, K / 128) to lists, as FlexAttention takes them.

    Returns:
        For each row of blocks the number of True ones, and the indices of all blocks, those of True ones first.
    """
    order = is_listed.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return is_listed.sum(-1, dtype=torch.int32), order.to(torch.int32)


def attend_to_block(
    q: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, mask: FlexMask, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend to these keys only, by FlexAttention; arguments and results as of `kernels.attend_to_block`."""
    kind = _codes(mask.mask_mod), q.dtype, softcap, torch.is_grad_enabled()
    out, auxiliary = _compiled(kind)(
        q,
        k_BMKD,
        v_BMKD,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k_BMKD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, auxiliary.lse


def attend_to_block_backward(
    gradient: Tensor,
    q: Tensor,
    k_BMKD: Tensor,
    v_BMKD: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: FlexMask,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """Return the contribution of these keys to the gradients of q, k, v; see [Note: gradients of a part of the keys].

    Args:
        gradient: gradient of the outputs.
        q, k_BMKD, v_BMKD, mask, **settings: arguments of the `attend_to_block` call.
        out, lse: outputs and lse over all keys; the lse is plus infinity for queries that see none.
    """
    with torch.enable_grad():
        q, k_BMKD, v_BMKD = inputs = [x.detach().requires_grad_() for x in (q, k_BMKD, v_BMKD)]
        partial_out, partial_lse = attend_to_block(q, k_BMKD, v_BMKD, mask, **settings)
    weight = (partial_lse.detach() - lse).exp().unsqueeze(-1)
    out_gradient = weight * gradient
    lse_gradient = (out_gradient * (partial_out.detach() - out)).sum(-1)
    gradients = out_gradient.to(partial_out.dtype), lse_gradient.to(partial_lse.dtype)
    return torch.autograd.grad((partial_out, partial_lse), inputs, gradients)


def _codes(value: Any) -> tuple[Any, ...]:
    """Return the code objects of a function and of the functions in its closure, as a key for `_compiled`.

    torch.compile traces them together, so other functions need another graph.
    """
    if isinstance(value, (tuple, list)):
        return tuple(map(_codes, value))
    if not isinstance(value, FunctionType):
        return ()
    return (value.__code__, *(_codes(cell.cell_contents) for cell in value.__closure__ or ()))


@cache
def _compiled(kind: tuple[Any, ...]) -> Any:
    """Return compiled FlexAttention for one kind of call. With a graph break torch would materialize all scores.

    torch compiles at most 8 graphs of one function and then raises. So each kind has a function of its own, whose
    graphs differ only in lengths.
    """

    def attend(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    attend.__code__ = attend.__code__.replace()  # graphs are kept by code
    return torch.compile(attend, fullgraph=True)


@cache
def _capped(softcap: float) -> Any:
    """Return the function of FlexAttention that bounds scores by `softcap`; one object for each bound."""
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)
