"""Parity rows of single model types: settings that change their layers, and batches that change their masks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from echelon.derive.stages import sizes_of
from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ..models.stand_ins import NO_FLASH_ATTN, installed_flash_attn
from .models import EagerChoice, PerMicrobatch
from .row import ParityRow, as_quick

LLAMA, BERT = ModelChoice(model_type="llama"), ModelChoice(model_type="bert")

# Settings of one model type that change its layers.

TP2, TP4, MIXED, ZERO = Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1)
STAGES_OF_RANKS = Layout(pp=2, schedule="interleaved", chunks=2)
GROUPED = {"new_decoder_architecture": True, "bias": True, "num_kv_heads": 2}  # of falcon
BEHIND = {"apply_residual_connection_post_layernorm": True}
VISION_HEAD, LLAMA_TYPE = {"vision_config": {"vision_use_head": True}}, {"model_type": "llama"}

Variant = tuple[str, dict[str, object], Layout]
VARIANTS: dict[str, Variant] = {
    "blip-2 whose vision model is wider": ("blip-2", {"vision_config": {"hidden_size": 48}}, Layout(pp=2)),
    "bloom whose heads are no power of 2": ("bloom", {"hidden_size": 48, "n_head": 6}, TP2),
    "bloom with residuals behind the norm": ("bloom", BEHIND, TP2),
    "cohere with normed heads": ("cohere", {"use_qk_norm": True}, MIXED),
    "cohere with normed heads, keys shared": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}, TP2),
    "falcon, one key for all": ("falcon", {"bias": True}, TP4),
    "falcon, one key each": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}, MIXED),
    "falcon with slopes": ("falcon", {"multi_query": False, "alibi": True}, MIXED),
    "falcon with slopes, one key for all": ("falcon", {"alibi": True}, TP2),
    "falcon with slopes, eager": ("falcon", {"alibi": True, "attn_implementation": "eager"}, TP2),
    "falcon, grouped": ("falcon", GROUPED, MIXED),
    "falcon, grouped, one norm": ("falcon", {**GROUPED, "num_ln_in_parallel_attn": 1}, TP2),
    "falcon, grouped, keys shared": ("falcon", GROUPED, TP4),
    "gemma3 with a head on its vision model": ("gemma3", VISION_HEAD, Layout(pp=2)),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}, TP2),
    "gptj, rotary in all of a head": ("gptj", {"rotary_dim": 8}, TP2),
    "opt with a narrow embedding": ("opt", {"word_embed_proj_dim": 16}, MIXED),
    "opt with norms behind": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, MIXED),
    "phi3 with grouped heads": ("phi3", {"num_key_value_heads": 2}, MIXED),
    "phi3, keys shared": ("phi3", {"num_key_value_heads": 2}, TP4),
    "phi3, one key for all": ("phi3", {"num_key_value_heads": 1}, MIXED),
    "blip-2 with a language model without an encoder": ("blip-2", {"text_config": LLAMA_TYPE}, MIXED),
    "sam without relative positions": ("sam", {"vision_config": {"use_rel_pos": False}}, TP2),
    "whisper, the backward is split in two": ("whisper", {}, Layout(pp=2, schedule="zbh1")),
    **{
        f"{model_type}, four stages": (model_type, {}, Layout(pp=4))
        for model_type in ("gemma3", "sam", "blip-2", "umt5", "whisper")
    },
    **{
        f"{model_type}, several stages a rank": (model_type, {}, STAGES_OF_RANKS)
        for model_type in ("sam", "blip-2", "whisper")
    },
}

# Numbers of heads that the ranks do not divide, so heads are padded: these have heads of width 8 and at most as many
# keys. The names are those of the config's hidden size and numbers of heads.
HEAD_NAMES = {
    **dict.fromkeys(("gpt2", "gptj"), ("n_embd", "n_head")),
    "bloom": ("hidden_size", "n_head"),
    "gpt_neo": ("hidden_size", "num_heads"),
}
HEADS: tuple[tuple[str, int, int | None, Layout, dict[str, object]], ...] = (
    ("cohere", 6, 3, TP2, {"head_dim": 8}),
    ("cohere", 3, 3, MIXED, {"use_qk_norm": True}),
    ("cohere", 9, 3, TP4, {"use_qk_norm": True}),
    ("llama", 3, 3, MIXED, {"attention_bias": True}),
    ("llama", 3, 3, TP4, {}),
    ("llama", 3, 1, ZERO, {"attention_bias": True}),
    ("llama", 6, 3, TP2, {}),
    ("llama", 6, 3, TP4, {}),
    ("qwen3", 6, 2, TP4, {"head_dim": 8}),
    ("mixtral", 3, 1, TP2, {}),
    ("deepseek_v3", 3, 3, TP2, {"hidden_size": 32}),
    ("phi3", 6, 3, TP2, {}),
    ("falcon", 3, None, TP2, {"bias": True}),
    ("falcon", 6, None, TP4, {**GROUPED, "alibi": True}),
    ("arcee", 6, 2, TP4, {"head_dim": 8}),  # its table is derived
    ("bloom", 3, None, MIXED, {}),
    ("gpt2", 3, None, MIXED, {}),
    ("gptj", 3, None, TP2, {}),
    ("gpt_neo", 3, None, TP2, {}),
    ("gpt_neox", 3, None, TP2, {}),
    ("opt", 3, None, TP2, {"word_embed_proj_dim": 24}),
    ("bert", 3, None, MIXED, {}),
    ("albert", 3, None, MIXED, {}),
    ("beit", 3, None, MIXED, {}),
    ("beit", 3, None, TP2, {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}),
    ("olmo2", 3, 3, MIXED, {}),
    ("olmo2", 6, 3, TP4, {}),
    ("olmo2", 6, 2, TP4, {}),
    ("vit", 3, None, TP2, {}),
)
# Models whose parts have their own heads.
VISION = {"hidden_size": 24, "num_attention_heads": 3}
Q_FORMER = {"hidden_size": 40, "num_attention_heads": 5, "encoder_hidden_size": 24}
HEADS_OF_PARTS: tuple[Variant, ...] = (
    ("bart", {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 6}, TP4),
    ("blip-2", {"vision_config": VISION, "qformer_config": Q_FORMER}, TP2),
    ("swin", {"num_heads": [3, 6, 6], "embed_dim": 24}, TP4),
    ("swinv2", {"num_heads": [3, 6, 6], "embed_dim": 24}, TP2),
    ("t5", {"num_heads": 3}, MIXED),
    ("t5", {"num_heads": 6}, TP4),
    ("umt5", {"num_heads": 3}, ZERO),
    ("whisper", {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 3}, MIXED),
)


def padded_heads() -> Iterator[tuple[str, Variant]]:
    """Yield variants with padded heads, and their names."""
    for model_type, query, key_value, layout, further in HEADS:
        width, heads = HEAD_NAMES.get(model_type, ("hidden_size", "num_attention_heads"))
        keys = {} if key_value is None else {"num_key_value_heads": key_value}
        name = f"{model_type}, {query} heads, {key_value or query} keys {'-'.join(further)}".strip()
        yield name, (model_type, {width: 8 * query, heads: query, **keys, **further}, layout)
    for model_type, settings, layout in HEADS_OF_PARTS:
        yield f"{model_type}, padded heads of its parts", (model_type, settings, layout)


QUICK_VARIANTS = (
    "falcon, one key for all",
    "llama, 3 heads, 1 keys attention_bias",
    "opt with a narrow embedding",
)


def matching(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Make a batch for retrieval by the matching head, whose Q-Former attends to image and text at once."""
    return {**make_batch(*args, **kwargs), "use_image_text_matching_head": True}


def variant_rows() -> Iterator[ParityRow]:
    """Yield variants in the settings of one model type."""
    for name, (model_type, settings, layout) in (*VARIANTS.items(), *padded_heads()):
        choice = ModelChoice(model_type=model_type, settings=tuple(settings.items()))
        row = ParityRow(name=name, choice=choice, layout=layout)
        yield as_quick(row) if name in QUICK_VARIANTS else row
    sounds = ModelChoice(model_type="whisper", head="audio_classification")
    all_layers = replace(sounds, settings=(("use_weighted_layer_sum", True),))
    yield ParityRow(name="whisper classified by all layers", choice=all_layers, layout=TP2)
    retrieval, name = (
        ModelChoice(model_type="blip-2", head="zero_shot_image"),
        "blip-2 matching images and text",
    )
    for layout in (TP2, Layout(pp=2)):
        yield ParityRow(name=name, choice=retrieval, layout=layout, batch=matching)


# Batches: packed texts, and queries that attend to no key.

PACKED_LAYOUTS = (
    *(Layout(tp=2), Layout(pp=2, recompute=1.0), Layout(sp=2, sequence="ring_attn"), Layout()),
    *(Layout(sp=2, sequence="all_to_all"), Layout(tp=2, sequence="split_gather")),
    Layout(sp=2, pp=2, sequence="ring_attn", schedule="interleaved", chunks=2),
    Layout(dp=2, zero=2, precision="bf16"),
)
RING = Layout(sp=2, sequence="ring_attn")
ULYSSES = Layout(sp=2, sequence="all_to_all")
UNSEEN_LAYOUTS = (
    *(Layout(sp=4, sequence="ring_attn", inner_ring=2), Layout(sp=2, tp=2, sequence="ring_attn")),
    Layout(sp=2, pp=2, sequence="ring_attn", recompute=1.0),
    *(replace(RING, precision="bf16"), replace(RING, precision="fp16"), ULYSSES),
)
# Some have windows of 5 tokens, some cap their scores, and the last two are bidirectional.
EAGER_TYPES = ("llama", "gemma2", "gemma3_text", "mistral", "gpt2", "bert", "roberta")
FLASH = (("attn_implementation", "flash_attention_2"),)


def packed(choice: ModelChoice, **size: Any) -> dict[str, Any]:
    """Make a batch with two texts in each row, by restarting position_ids and without an attention_mask.

    transformers separates such texts in a call without a cache, as set by use_cache of the call, or else of the config.
    The same holds under a layout: the meaning of `model(**batch)` does not depend on Echelon.
    """
    batch = make_batch(choice, **size)
    rows, length = batch.pop("attention_mask").shape
    batch["labels"] = batch["input_ids"]
    positions = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])
    return batch | {"position_ids": positions.expand(rows, -1)}


def packed_without_a_cache(choice: ModelChoice, **size: Any) -> dict[str, Any]:
    """Make the same batch for a call without a cache."""
    return packed(choice, **size) | {"use_cache": False}


def packed_in_one_row(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make microbatches of one row: flash attention separates texts if a batch is one row, with or without a cache."""
    return packed(choice, num_samples=3, seed=seed)


def with_unseen_keys(choice: ModelChoice, **size: Any) -> dict[str, Tensor]:
    """Make a batch with queries that attend to no key: padded on the left, or with a mask of zeros for the last sample.

    Eager attention returns the mean of all values for such a query, and torch's own returns 0; so must a ring.
    """
    batch = make_batch(choice, **size)
    if choice.head_name == "causal":
        return {name: value.flip(-1) for name, value in batch.items()}
    mask = batch["attention_mask"].clone()
    mask[-1] = 0
    return batch | {"attention_mask": mask}


def with_unequal_images(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make texts with 0, 1 or 2 images of unequal sizes, whose patches lie one after the other."""
    drawn = torch.Generator().manual_seed(seed)
    config: Any = choice.copy().model.config
    token, width = config.image_token_id, make_batch(choice, num_samples=1, seed=0)["pixel_values"].shape[1]
    input_ids = torch.randint(100, 250, (num_samples, 24), generator=drawn)
    sides = []
    for sample in range(num_samples):
        for image in range((sample + 1) % 3):
            start, num_tokens = 2 + 7 * image, 4 * (1 + image)  # a token for 2 x 2 patches
            input_ids[sample, start : start + num_tokens] = token
            sides.append((1, 4, num_tokens))
    is_image, grid = input_ids == token, torch.tensor(sides)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": is_image.int(),
        "labels": input_ids.masked_fill(is_image, -100),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), width, generator=drawn),
        "image_grid_thw": grid,
    }


def with_images_of_one_replica(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make the same batch for even seeds, and texts alone for odd ones."""
    batch = with_unequal_images(choice, num_samples=num_samples, seed=seed)
    if seed % 2 == 0:
        return batch
    texts, types = batch["input_ids"].clamp(min=100), torch.zeros_like(batch["mm_token_type_ids"])
    masks = {"attention_mask": batch["attention_mask"], "mm_token_type_ids": types}
    return {"input_ids": texts, "labels": texts, **masks}


def cut_in_the_text() -> AbstractContextManager[Any]:
    """Cut stages in the language model, as with weights of usual sizes; the small copy's vision model is larger."""

    def sizes(model: nn.Module) -> dict[str, int]:
        return {path: size * ("visual" not in path) for path, size in sizes_of(model).items()}

    return patch("echelon.derive.stages.sizes_of", sizes)


IMAGE_BATCHES = {"unequal images": with_unequal_images, "images of one replica": with_images_of_one_replica}


def image_rows() -> Iterator[ParityRow]:
    """Yield images of unequal numbers and sizes; the first row is quick."""
    layouts = (
        ("qwen2_vl", Layout(dp=2, zero=1)),
        ("qwen2_vl", Layout(pp=2, dp=2)),
        ("qwen2_5_vl", Layout(dp=2, zero=2)),
        ("qwen3_vl", Layout(dp=2, zero=2)),
    )
    for (model_type, layout), (name, batch) in product(layouts, IMAGE_BATCHES.items()):
        choice, name = ModelChoice(model_type=model_type), f"{name} {model_type}"
        row = ParityRow(name=name, choice=choice, layout=layout, batch=batch, within=cut_in_the_text)
        is_quick = layout.zero == 1 and batch is with_unequal_images
        yield replace(row, num_steps=2, quick=True) if is_quick else row


def batch_rows() -> Iterator[ParityRow]:
    """Yield packed texts, and queries that attend to no key, by eager, torch's and flash attention."""
    for model_type in ("llama", "gemma2", "qwen2_moe"):
        choice, name = ModelChoice(model_type=model_type), f"packed {model_type}"
        built = replace(choice, settings=(("use_cache", False),))
        for layout in PACKED_LAYOUTS if choice == LLAMA else PACKED_LAYOUTS[:3]:
            row = ParityRow(name=name, choice=choice, layout=layout, batch=packed)
            yield as_quick(row) if choice == LLAMA and layout == RING else row
            yield replace(row, name=f"{name} called without a cache", batch=packed_without_a_cache)
            yield replace(row, name=f"{name} built without a cache", choice=built)
    # Its layers get the cache as a positional argument, so recomputation would fill it twice.
    gpt2, recomputed = ModelChoice(model_type="gpt2"), replace(RING, recompute=1.0)
    yield as_quick(ParityRow(name="packed gpt2", choice=gpt2, layout=recomputed, batch=packed))
    eager = [(model_type, RING) for model_type in EAGER_TYPES]
    eager += [*product(EAGER_TYPES[:2], UNSEEN_LAYOUTS), ("gpt_oss", ULYSSES)]  # with sinks
    for model_type, layout in eager:
        choice, name = EagerChoice(model_type=model_type), f"unseen keys {model_type} eager"
        row = ParityRow(name=name, choice=choice, layout=layout, batch=with_unseen_keys)
        yield as_quick(row) if (model_type, layout) == ("gemma2", RING) else row
    for model_type, layout in product(("llama", "mistral", "roberta"), (RING, ULYSSES)):
        choice, name = ModelChoice(model_type=model_type), f"unseen keys {model_type}"
        yield ParityRow(name=name, choice=choice, layout=layout, batch=with_unseen_keys)


def flash_rows() -> Iterator[ParityRow]:
    """Yield the batches of `batch_rows` with a stand-in for the package flash-attn."""
    row = partial(ParityRow, within=installed_flash_attn, missing=NO_FLASH_ATTN)
    llama, bert = (replace(choice, settings=FLASH) for choice in (LLAMA, BERT))
    by_microbatch = PerMicrobatch(model_type="llama", settings=FLASH)
    for layout in (RING, ULYSSES):
        for choice, batch in ((llama, packed), (by_microbatch, packed_in_one_row)):
            yield row(name=f"{batch.__name__} llama flash", choice=choice, layout=layout, batch=batch)
        for choice in (llama, bert):
            name = f"unseen keys {choice.model_type} flash"
            yield row(name=name, choice=choice, layout=layout, batch=with_unseen_keys)
