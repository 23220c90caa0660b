"""Masks made by transformers: full, and as blocks."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, MistralConfig
from transformers import masking_utils as masks
from transformers.models.mistral.modeling_mistral import eager_attention_forward

from echelon.cluster.transformers_api import CACHE_NAMES, register_attention
from echelon.shardformer.sequence.block_mask import BlockMask, block_mask

BATCH = 2


def padding(length: int, *, at_end: bool = True) -> Tensor:
    """Return a padding mask: one row shorter by a third, one of full length."""
    seen = torch.ones(BATCH, length, dtype=torch.long)
    missing = length // 3
    seen[0, length - missing if at_end else 0 : length if at_end else missing] = 0
    return seen


def packed_positions(length: int) -> Tensor:
    """Return positions of two sequences in the first row, and of one in the second."""
    cut = length // 2 - 1
    both = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    return torch.stack([both, torch.arange(length)])


def ordered(length: int) -> dict[str, Any]:
    return {"position_ids": torch.arange(length)[None]}


def of_images(length: int) -> dict[str, Any]:
    """Let tokens of images see each other, by a function of single positions."""
    of_image = torch.arange(length) // 3 % 2 == 1
    return ordered(length) | {"or_mask_function": lambda b, h, q, k: of_image[q] & of_image[k]}


# The function that makes a kind of mask, and its arguments for a length. Padding may be at either end; positions that
# restart mark packed sequences.
KINDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "causal": ("create_causal_mask", ordered),
    "bidirectional": ("create_bidirectional_mask", lambda length: {}),
    "padded": ("create_causal_mask", lambda length: {"attention_mask": padding(length)}),
    "padded left": ("create_causal_mask", lambda length: {"attention_mask": padding(length, at_end=False)}),
    "bidirectional padded": ("create_bidirectional_mask", lambda length: {"attention_mask": padding(length)}),
    "packed": ("create_causal_mask", lambda length: {"position_ids": packed_positions(length)}),
    "window": ("create_sliding_window_causal_mask", ordered),
    "wide window": ("create_sliding_window_causal_mask", ordered),
    "chunked": ("create_chunked_causal_mask", ordered),
    "chunked padded": (
        "create_chunked_causal_mask",
        lambda length: {"attention_mask": padding(length, at_end=False)},
    ),
    "union": ("create_causal_mask", of_images),
    "empty row": (
        "create_bidirectional_mask",
        lambda length: {"attention_mask": torch.arange(BATCH)[:, None].repeat(1, length)},
    ),
}
if hasattr(masks, "create_bidirectional_sliding_window_mask"):  # not in older releases
    KINDS["bidirectional window"] = ("create_bidirectional_sliding_window_mask", lambda length: {})


def made(kind: str, length: int, implementation: str) -> Any:
    """Make a mask of this kind by the registered implementation."""
    config = MistralConfig(sliding_window=5 if kind != "wide window" else length + 1, attention_chunk_size=4)
    config._attn_implementation = implementation
    function, arguments = KINDS[kind]
    return make(function, config, length, **arguments(length))


def make(function: str, config: MistralConfig, length: int, **arguments: Any) -> Any:
    """Call a mask function of transformers with the arguments that the installed release has."""
    embeds = torch.zeros(BATCH, length, 1)
    known: dict[str, Any] = {
        "inputs_embeds": embeds,
        "input_embeds": embeds,
        "attention_mask": None,
        "cache_position": torch.arange(length),
        **dict.fromkeys(CACHE_NAMES),
    }
    call = getattr(masks, function)
    takes = inspect.signature(call).parameters
    return call(config=config, **{**{name: known[name] for name in known if name in takes}, **arguments})


def in_blocks(kind: str, length: int, *, levels: bool = False) -> BlockMask:
    """Make a mask by `block_mask`."""
    with registered("blocks", partial(block_mask, is_eager=levels)):
        return made(kind, length, "blocks")


def full_mask(kind: str, length: int) -> Tensor:
    """Make a full mask (B, 1, S, S), by transformers' function for torch's attention."""

    def always(*args: Any, **kwargs: Any) -> Tensor:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = masks.sdpa_mask(*args, **{**kwargs, **skips})
        assert mask is not None
        return mask.expand(BATCH, 1, length, length)

    AttentionMaskInterface.register("always", always)  # as this release calls it
    try:
        return made(kind, length, "always")
    finally:
        del AttentionMaskInterface._global_mapping["always"]


@contextmanager
def registered(name: str, function: Any) -> Iterator[None]:
    """Register a mask function in transformers inside the block."""
    register_attention(name, eager_attention_forward, function)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[name], AttentionInterface._global_mapping[name]
