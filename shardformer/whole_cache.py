"""Refusing caches that were made for all heads: a rank of the tensor axis has the keys and values of its own alone."""

from typing import Any

from torch import nn


def refuse_whole_caches(model: nn.Module) -> None:
    """Let calls of a split transformers model raise ValueError for a cache that was made beforehand for all heads.

    Otherwise a cache is made at the first call, for the heads that there are.
    """
    if hasattr(model, "config"):
        model.register_forward_pre_hook(_refuse, with_kwargs=True)


def _refuse(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    for layer in getattr(kwargs.get("past_key_values"), "layers", ()):
        is_early = getattr(layer, "is_initialized", False) and not layer.get_seq_length()
        if is_early and 1 < getattr(layer, "num_heads", 0) == _num_heads(model.config):
            raise ValueError(
                f"this cache was made beforehand for all {layer.num_heads} key-value heads, of which a rank of the "
                "tensor axis has its own alone (generate does so with prefill_chunk_size and a static cache): leave "
                "prefill_chunk_size out, or hand over a cache that is made at its first use"
            )


def _num_heads(config: Any) -> int:
    """The key-value heads of the whole model, as transformers makes caches for them."""
    text = config.get_text_config(decoder=True)
    found: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return found
