"""In the place of packages that cannot be installed here: their documented signature, computed by plain torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class LowerTriangularMask:
    """xFormers' word for: each query sees the keys up to its own."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | LowerTriangularMask | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention over (B, length, heads, width), with the bias (B, heads, queries, keys) where it is a tensor."""
    batch, num_queries, heads, width = query.shape
    num_keys = key.shape[1]
    assert key.shape[:3] == value.shape[:3] == (batch, num_keys, heads), "keys have other heads than queries"
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) * (width**-0.5 if scale is None else scale)
    if isinstance(attn_bias, Tensor):
        assert attn_bias.shape == scores.shape and attn_bias.dtype == query.dtype
        assert attn_bias.stride(-1) == 1 and attn_bias.stride(-2) % 8 == 0, "rows of the bias are not aligned"
        scores = scores + attn_bias
    elif attn_bias is not None:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = nn.functional.dropout(scores.float().softmax(-1), p).to(value.dtype)
    return torch.einsum("bnqk,bknd->bqnd", weights, value)


@contextmanager
def installed(**modules: dict[str, Any]) -> Iterator[None]:
    """Let modules be importable, each with these attributes; dots of a name are written as two underscores."""
    made: dict[str, ModuleType] = {}
    for underscored, attributes in modules.items():
        name = underscored.replace("__", ".")
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            made.setdefault(path, ModuleType(path)).__spec__ = ModuleSpec(path, None, is_package=True)
        vars(made[name]).update(attributes)
    with mock.patch.dict(sys.modules, made):
        yield


@contextmanager
def installed_xformers() -> Iterator[mock.Mock]:
    """xFormers, on the CPU too; gives what counts the calls of its attention."""
    attention = mock.Mock(wraps=memory_efficient_attention)
    devices = mock.patch("echelon.shardformer.attention_xformers.DEVICES", ("cpu", "cuda"))
    attributes = {"memory_efficient_attention": attention, "LowerTriangularMask": LowerTriangularMask}
    with installed(xformers__ops=attributes), devices:
        yield attention
