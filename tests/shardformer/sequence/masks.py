"""Masks as transformers makes them: whole, and as blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, MistralConfig
from transformers import masking_utils as masks

from echelon.shardformer.sequence.block_mask import BlockMask, Seen, block_mask

BATCH = 2

# By name: the function of transformers that makes the mask, and what it is given besides. Padding may stand at either
# end; positions that begin anew say where packed sequences do.
KINDS = (
    "causal",
    "bidirectional",
    "padded",
    "padded left",
    "bidirectional padded",
    "packed",
    "window",
    "wide window",
    "bidirectional window",
    "chunked",
    "chunked padded",
    "union",
    "empty row",
)


def padding(length: int, *, at_end: bool = True) -> Tensor:
    """One row shorter by a third, one whole."""
    seen = torch.ones(BATCH, length, dtype=torch.long)
    missing = length // 3
    seen[0, length - missing if at_end else 0 : length if at_end else missing] = 0
    return seen


def packed_positions(length: int) -> Tensor:
    """Two sequences in the first row, one in the second."""
    cut = length // 2 - 1
    both = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    return torch.stack([both, torch.arange(length)])


def made(kind: str, length: int, implementation: str) -> Any:
    """A mask of a kind, by what is registered under a name."""
    config = MistralConfig(sliding_window=5 if kind != "wide window" else length + 1, attention_chunk_size=4)
    config._attn_implementation = implementation
    embeds = torch.zeros(BATCH, length, 1)
    common: dict[str, Any] = {"config": config, "inputs_embeds": embeds, "past_key_values": None}
    causal = {"attention_mask": None, "position_ids": torch.arange(length)[None]}
    match kind:
        case "causal":
            return masks.create_causal_mask(**common, **causal)
        case "padded" | "padded left":
            common["attention_mask"] = padding(length, at_end=kind == "padded")
            return masks.create_causal_mask(**common)
        case "bidirectional":
            return masks.create_bidirectional_mask(**common, attention_mask=None)
        case "bidirectional padded":
            return masks.create_bidirectional_mask(**common, attention_mask=padding(length))
        case "packed":
            causal["position_ids"] = packed_positions(length)
            return masks.create_causal_mask(**common, **causal)
        case "window" | "wide window":
            return masks.create_sliding_window_causal_mask(**common, **causal)
        case "bidirectional window":
            return masks.create_bidirectional_sliding_window_mask(**common, attention_mask=None)
        case "chunked":
            return masks.create_chunked_causal_mask(**common, **causal)
        case "chunked padded":
            return masks.create_chunked_causal_mask(**common, attention_mask=padding(length, at_end=False))
        case "union":  # with a function of single numbers
            of_image = torch.arange(length) // 3 % 2 == 1
            return masks.create_causal_mask(
                **common, **causal, or_mask_function=lambda b, h, q, k: of_image[q] & of_image[k]
            )
        case "empty row":
            common["attention_mask"] = torch.zeros(BATCH, length, dtype=torch.long)
            common["attention_mask"][1] = 1
            return masks.create_bidirectional_mask(**common)
    raise AssertionError(kind)


def in_blocks(kind: str, length: int) -> BlockMask:
    """As `block_mask` makes it."""
    with registered("blocks", block_mask):
        return made(kind, length, "blocks")


def whole(kind: str, length: int) -> Tensor:
    """(B, 1, S, S), as transformers makes it for torch's own attention."""

    def always(*args: Any, **kwargs: Any) -> Tensor:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = masks.sdpa_mask(*args, **{**kwargs, **skips})
        assert mask is not None
        return mask.expand(BATCH, 1, length, length)

    with registered("always", always):
        return made(kind, length, "always")


def as_tensor(seen: Seen | Tensor, queries: range, keys: range) -> Tensor:
    """The answer for a block as booleans."""
    if isinstance(seen, Tensor):
        return seen
    ones = torch.ones(len(queries), len(keys), dtype=torch.bool)
    return {Seen.ALL: ones, Seen.NOTHING: ~ones, Seen.TRIANGLE: ones.tril()}[seen]


@contextmanager
def registered(name: str, function: Any) -> Iterator[None]:
    """Inside, transformers knows a mask function by this name."""
    AttentionMaskInterface.register(name, function)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[name]
