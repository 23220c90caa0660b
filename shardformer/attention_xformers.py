"""Attention by xFormers, under a name of transformers' interface. Which one a model computes with is attention.py."""

# B batch, N query heads, M key-value heads, Q queries, K keys, D width of a head

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention_arguments import BESIDES

XFORMERS = "xformers"
DEVICES = ("cuda",)  # for which xFormers has kernels

_ALIGNMENT = 8  # rows of a bias begin at multiples of so many entries


def register_xformers() -> None:
    """Make "xformers" an attention that models of transformers can be set to. Doing it again changes nothing."""
    AttentionInterface.register(XFORMERS, xformers_attention)
    AttentionMaskInterface.register(XFORMERS, AttentionMaskInterface()["sdpa"])


def xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, by `xformers.ops.memory_efficient_attention`.

    Args:
        module: the attention; its `is_causal` holds where the argument is None.
        query: (B, N, Q, D).
        key, value: (B, M, K, D), where M divides N.
        attention_mask: (B or 1, N or 1, Q, K): True, or 0, where a query sees a key. Without one all are seen, or with
            `is_causal` those before.
        dropout: probability, 0 outside of training.
        scaling: of the scores; None is D to the power of -1/2.
        position_bias: (B or 1, N or 1, Q, K), added to the scores; it may have a gradient.

    Returns:
        (B, Q, N, D), and None for the weights, which are not computed.

    Raises:
        ValueError: it is given something that it cannot compute with.
    """
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unknown := sorted(given - BESIDES):
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, of which xFormers knows nothing and "
            "which would silently be lost: leave enable_xformers out for this model"
        )
    ops = import_module("xformers.ops")
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    bias: Any = None
    if attention_mask is not None or position_bias is not None:
        bias = _bias(query, key.shape[2], attention_mask, position_bias, is_causal=causal)
    elif causal:
        bias = ops.LowerTriangularMask()
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]  # a cache may be longer
    out_BQND = ops.memory_efficient_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_bias=bias,
        p=dropout,
        scale=scaling,
    )
    if (
        attention_mask is not None and attention_mask.dtype == torch.bool
    ):  # who sees nothing gets 0, as by sdpa
        out_BQND = out_BQND * attention_mask.any(-1, keepdim=True).transpose(1, 2)
    return out_BQND.contiguous(), None


def _bias(
    query: Tensor, num_keys: int, mask: Tensor | None, position_bias: Tensor | None, *, is_causal: bool
) -> Tensor:
    """What is added to the scores: (B, N, Q, K) in the queries' format, with rows aligned as the kernels need them."""
    least = torch.finfo(query.dtype).min  # finite, so that a query that sees nothing gets numbers
    batch, heads, num_queries, _ = query.shape
    if mask is None and is_causal:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()[None, None]
    added = (
        torch.zeros((), dtype=query.dtype, device=query.device) if position_bias is None else position_bias
    )
    if mask is not None:
        added = torch.where(mask, added, least) if mask.dtype == torch.bool else added + mask
    whole = added.to(query.dtype).expand(batch, heads, num_queries, num_keys)
    padding = -num_keys % _ALIGNMENT
    return nn.functional.pad(whole.contiguous(), (0, padding))[..., :num_keys]
