"""Stand-ins for packages that cannot be installed here: their documented signatures, computed by plain torch."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flash_attention as flash_integration

from echelon.shardformer.layers.attention_kernels import FLASH_ATTENTION_2, KERNELS, XFORMERS

# Models that import their calls of flash-attn only if it is installed.
_IMPORT_IF_INSTALLED = ("falcon", "gpt_neo", "gptj")
# The reason why `installed_flash_attn` cannot stand in: older releases do not find it; else empty.
NO_FLASH_ATTN = (
    ""
    if hasattr(flash_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX")
    else f"transformers {transformers.__version__} looks for flash-attn in another way"
)


class LowerTriangularMask:
    """xFormers' causal mask: each query attends to the keys up to its own position."""


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
    """Compute attention over (B, length, heads, width), with a bias (B, heads, queries, keys) if it is a tensor."""
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


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Compute attention over (B, length, heads, width); the last query is at the last key; windows are inclusive."""
    assert k.shape == v.shape, "flash-attn takes keys and values of one width"
    assert q.shape[-1] == k.shape[-1] and q.shape[2] % k.shape[2] == 0, (
        "key-value heads do not divide the queries'"
    )
    assert alibi_slopes is None and not return_attn_probs
    k, v = (tensor.repeat_interleave(q.shape[2] // k.shape[2], 2) for tensor in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * (
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    ahead = torch.arange(k.shape[1])[None] - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    left, right = window_size[0], 0 if causal else window_size[1]
    unseen = ((ahead > right) if right >= 0 else ahead < -k.shape[1]) | (
        (ahead < -left) if left >= 0 else False
    )
    weights = nn.functional.dropout(scores.float().masked_fill(unseen, -torch.inf).softmax(-1), dropout_p)
    return torch.einsum("bnqk,bknd->bqnd", weights.to(v.dtype), v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Compute the same for concatenated samples, (tokens, heads, width), which begin at `cu_seqlens`."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and block_table is None
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    settings: dict[str, Any] = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size)
    settings |= dict(softcap=softcap, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    samples = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat(
        [flash_attn_func(*(tensor[None] for tensor in sample), **settings)[0] for sample in samples]
    )


@contextmanager
def installed(**modules: dict[str, Any]) -> Iterator[None]:
    """Make modules with these attributes importable; dots of a name are written as two underscores."""
    made: dict[str, ModuleType] = {}
    for underscored, attributes in modules.items():
        name = underscored.replace("__", ".")
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            made.setdefault(path, ModuleType(path)).__spec__ = ModuleSpec(path, None, is_package=True)
        vars(made[name]).update(attributes)
    replaced = {name: sys.modules[name] for name in made if name in sys.modules}
    sys.modules.update(made)
    try:
        yield
    finally:  # other modules imported in the block stay
        for name in made:
            del sys.modules[name]
        sys.modules.update(replaced)


@contextmanager
def installed_xformers() -> Iterator[mock.Mock]:
    """Install a stand-in for xFormers, also on the CPU; yields a mock that counts the calls of its attention."""
    attention = mock.Mock(wraps=memory_efficient_attention)
    kernels = mock.patch.dict(KERNELS, {XFORMERS: replace(KERNELS[XFORMERS], needs_cuda=False)})
    attributes = {"memory_efficient_attention": attention, "LowerTriangularMask": LowerTriangularMask}
    with installed(xformers__ops=attributes), kernels:
        yield attention


@contextmanager
def installed_flash_attn() -> Iterator[list[str]]:
    """Install a stand-in for flash-attn, also on the CPU and in float32; yields the names of the called functions."""
    called: list[str] = []
    late_importers = [
        import_module(f"transformers.models.{name}.modeling_{name}") for name in _IMPORT_IF_INSTALLED
    ]

    def noted(function: Any) -> Any:
        @wraps(function)  # transformers reads the signature
        def call(*args: Any, **kwargs: Any) -> Tensor:
            called.append(function.__name__)
            output: Tensor = function(*args, **kwargs)
            return output

        return call

    functions = {
        "flash_attn_func": noted(flash_attn_func),
        "flash_attn_varlen_func": noted(flash_attn_varlen_func),
        "flash_attn_with_kvcache": None,
    }
    padding = {"pad_input": flash_utils._pad_input, "unpad_input": flash_utils._unpad_input}
    availability = {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, "cpu"),)}
    unloaded = dict.fromkeys(
        ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn")
    )
    with (
        installed(flash_attn=functions, flash_attn__bert_padding=padding),
        mock.patch.multiple(flash_utils, is_flash_attn_2_available=lambda **_: True, **unloaded),
        mock.patch.dict(flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], availability),
        # transformers would cast float32 inputs, which the package does not support.
        mock.patch.object(flash_integration, "get_target_dtype", lambda query, module: None),
        mock.patch("echelon.shardformer.fused.flash_kernel", lambda device: FLASH_ATTENTION_2),
        mock.patch.dict(
            KERNELS,
            {FLASH_ATTENTION_2: replace(KERNELS[FLASH_ATTENTION_2], is_16_bit_only=False, needs_cuda=False)},
        ),
        ExitStack() as stack,
    ):
        forward = {"_flash_attention_forward": flash_utils._flash_attention_forward}
        for module in late_importers:
            stack.enter_context(mock.patch.multiple(module, **forward, create=True))
        yield called
