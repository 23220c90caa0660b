"""Attention kernels for one block of keys. ring_attention.py combines the results of the blocks.

Forward returns outputs and the logarithm of the sum of the exponentials of the scores (lse). Backward takes outputs and
lse over *all* keys: the recomputed probabilities exp(score − lse) are then exact, and so is the block's contribution
to the gradients (arXiv:2205.14135, appendix B).
"""

from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from ...cluster.device import is_cuda
from . import flex
from .block_mask import BlockKind, is_hidden

# B batch, N query heads, M key and value heads, Q queries, K keys, D head dim

_aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """Mask and settings of attention to one block of keys.

    Args:
        visible: all keys, the triangle, numbers to add to the scores (minus infinity at hidden keys), booleans, or
            a FlexAttention mask.
        scale: factor of the scores.
        softcap: bound of the scaled scores, by softcap · tanh(score / softcap); None is no bound.
        dropout: the probability of dropping a key.
        seed: seed of the dropout.
        is_uniform: True for queries that see no key in eager attention. It adds the dtype's least number to the scores
            of hidden keys, which rounds them all to the same value: every key gets the same weight.
    """

    visible: BlockKind | Tensor | flex.FlexMask
    _: KW_ONLY
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    is_uniform: bool = False


Gradients = tuple[Tensor, ...]  # for q, k, v


def attend_to_block(q: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys.

    Args:
        q: (B, N, Q, D).
        k_BMKD, v_BMKD: keys and values; M divides N.
        view: mask and settings.

    Returns:
        Outputs (B, N, Q, D) and lse (B, N, Q): 0 and minus infinity for queries that see no key.
    """
    if isinstance(view.visible, flex.FlexMask):
        return flex.attend_to_block(q, k_BMKD, v_BMKD, view.visible, scale=view.scale, softcap=view.softcap)
    view = _with_additive_mask(view, q.dtype)
    k, v = _repeated_heads(q, k_BMKD), _repeated_heads(q, v_BMKD)
    attend = _flash if is_fused(q, v, view) else _plain
    out, lse = attend(q, k, v, view)
    if isinstance(view.visible, Tensor):  # fused kernels return an lse of 0 for queries that see no key
        lse = lse.masked_fill((view.visible == -torch.inf).all(-1), -torch.inf)
    return out, lse


def attend_to_block_backward(
    gradient: Tensor, q: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, out: Tensor, lse: Tensor, view: View
) -> Gradients:
    """Return a block's contribution to the gradients of q, k, v.

    Args:
        gradient: gradient of the outputs.
        q, k_BMKD, v_BMKD, view: arguments of the `attend_to_block` call.
        out, lse: outputs and lse over all keys; the lse is plus infinity for queries that see none.
    """
    if isinstance(view.visible, flex.FlexMask):
        settings = {"scale": view.scale, "softcap": view.softcap}
        return flex.attend_to_block_backward(gradient, q, k_BMKD, v_BMKD, out, lse, view.visible, **settings)
    view = _with_additive_mask(view, q.dtype)
    k, v = _repeated_heads(q, k_BMKD), _repeated_heads(q, v_BMKD)
    backward = _flash_backward if is_fused(q, v, view) else _plain_backward
    dq, dk, dv = backward(gradient, q, k, v, out, lse, view)
    return dq, _sum_over_query_heads(dk, k_BMKD), _sum_over_query_heads(dv, v_BMKD)


def is_fused(q: Tensor, v: Tensor, view: View) -> bool:
    """Return True if torch's flash attention supports this, without materializing all scores."""
    if view.softcap is not None or view.dropout or view.is_uniform or q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return True
    is_short = q.dtype in (torch.float16, torch.bfloat16)
    fits = q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return is_cuda(q.device) and is_short and fits and not isinstance(view.visible, Tensor)


def _with_additive_mask(view: View, dtype: torch.dtype) -> View:
    """Convert a mask tensor to additive form: booleans to numbers, and the dtype's least number to minus infinity."""
    if not isinstance(view.visible, Tensor):
        return view
    hidden = ~view.visible if view.visible.dtype == torch.bool else is_hidden(view.visible)
    bias = torch.zeros((), device=hidden.device) if view.visible.dtype == torch.bool else view.visible
    bias = (
        bias.to(torch.promote_types(dtype, torch.float32))
        .expand(hidden.shape)
        .masked_fill(hidden, -torch.inf)
    )
    return replace(view, visible=bias)


def _repeated_heads(q: Tensor, x_BMKD: Tensor) -> Tensor:
    """Repeat each key or value head for every query head of its group."""
    return (
        x_BMKD
        if q.shape[1] == x_BMKD.shape[1]
        else x_BMKD.repeat_interleave(q.shape[1] // x_BMKD.shape[1], 1)
    )


def _sum_over_query_heads(gradient_BNKD: Tensor, x_BMKD: Tensor) -> Tensor:
    """Sum the gradients of keys or values over the query heads that share them; `x_BMKD` has the unrepeated heads."""
    if gradient_BNKD.shape[1] == x_BMKD.shape[1]:
        return gradient_BNKD
    dtype = torch.promote_types(gradient_BNKD.dtype, torch.float32)
    return gradient_BNKD.unflatten(1, (x_BMKD.shape[1], -1)).sum(2, dtype=dtype)


def _plain_scores(q: Tensor, k: Tensor, view: View) -> Tensor:
    """Return the scores (B, N, Q, K) without a mask, in float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).mT * view.scale
    return scores if view.softcap is None else scores.div_(view.softcap).tanh_().mul_(view.softcap)


def _masked(scores: Tensor, view: View, dtype: torch.dtype) -> Tensor:
    """Return scores with minus infinity, or the mask's addends, where a query does not see a key.

    With `is_uniform` the scores of a query first become equal, by the rounding of eager attention; see `View`.
    """
    if view.is_uniform:
        least = torch.finfo(dtype).min
        # Not simply zero: in fp16 a score above 16 survives the rounding.
        scores = (scores.to(dtype) + least - least).to(scores.dtype)
    if isinstance(view.visible, Tensor):
        return scores + view.visible
    if view.visible is BlockKind.TRIANGLE:
        return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _dropped_out(probabilities: Tensor, view: View) -> Tensor:
    """Apply dropout to probabilities, the same entries at each call with this seed."""
    if not view.dropout:
        return probabilities
    generator = torch.Generator(probabilities.device).manual_seed(view.seed)
    is_kept = torch.empty_like(probabilities).bernoulli_(1 - view.dropout, generator=generator)
    return probabilities * is_kept / (1 - view.dropout)


def _plain(q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Return outputs and lse for these keys, from materialized scores in float32 or wider."""
    scores = _masked(_plain_scores(q, k, view), view, q.dtype)
    lse = scores.logsumexp(-1)
    scores -= lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    return _dropped_out(scores.exp_(), view) @ v.to(scores.dtype), lse


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: View
) -> Gradients:
    """Return the gradients of q, k and v for these keys, from materialized scores and in their format."""
    scores = _plain_scores(q, k, view)
    probabilities = (_masked(scores, view, q.dtype) - lse.unsqueeze(-1)).exp_()
    dtype = probabilities.dtype
    gradient, q, k, v, out = (x.to(dtype) for x in (gradient, q, k, v, out))
    dv = _dropped_out(probabilities, view).mT @ gradient
    score_gradient = _dropped_out(gradient @ v.mT, view) - (gradient * out).sum(-1, keepdim=True)
    dscores = score_gradient * probabilities * view.scale
    if view.softcap is not None:
        dscores *= 1 - (scores / view.softcap).square()  # tanh' = 1 − tanh²
    return dscores @ k, dscores.mT @ q, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Return outputs and lse for these keys by torch's flash kernel, if `is_fused`."""
    is_causal, bias = _causal_and_bias(view)
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=view.scale
        )
    else:
        assert bias is None  # see `is_fused`: CUDA's kernel takes no mask tensor
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=view.scale)
    return out, lse


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: View
) -> Gradients:
    """Return the gradients of q, k and v for these keys by torch's flash kernel."""
    is_causal, bias = _causal_and_bias(view)
    gradients: Gradients
    if q.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=view.scale
        )
        return gradients
    assert bias is None  # as in `_flash`
    lengths = None, None, q.shape[2], k.shape[2]  # None: all rows of the batch have the same length
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # with offset: used only for dropout
    gradients = _aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, lse.contiguous(), *lengths, 0.0, is_causal, seed, seed[0], scale=view.scale
    )
    return gradients


def _causal_and_bias(view: View) -> tuple[bool, Tensor | None]:
    """Return the mask as arguments of torch's kernels: is_causal, and numbers to add to the scores."""
    return view.visible is BlockKind.TRIANGLE, view.visible if isinstance(view.visible, Tensor) else None
