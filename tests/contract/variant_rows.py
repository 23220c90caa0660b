"""Rows of parity of single model types: settings that change their layers, and batches that change what they see."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from echelon.verify.batch import make_batch
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ..models.stand_ins import LOOKS_FOR_FLASH_ATTN, installed_flash_attn
from .models import EagerChoice
from .row import ParityRow

LLAMA, BERT = ModelChoice(model_type="llama"), ModelChoice(model_type="bert")

# Settings of one model type that change its layers.

TP2, TP4, MIXED, ZERO = Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1)
STAGES_OF_FOUR = Layout(pp=4)
STAGES_OF_RANKS = Layout(pp=2, schedule="interleaved", chunks=2)
FALCON_GROUPED = {"new_decoder_architecture": True, "bias": True}


def heads(query: int, key_value: int, **further: object) -> dict[str, object]:
    """Settings of so many heads."""
    sizes = {"hidden_size": 48, "num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": 8}
    return {**sizes, **further}


VARIANTS: dict[str, tuple[str, dict[str, object], Layout]] = {
    "blip-2 whose vision model is wider": ("blip-2", {"vision_config": {"hidden_size": 48}}, Layout(pp=2)),
    "bloom whose heads are no power of 2": ("bloom", {"hidden_size": 48, "n_head": 6}, TP2),
    "bloom with residuals behind the norm": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        TP2,
    ),
    "cohere with normed heads": ("cohere", {"use_qk_norm": True}, MIXED),
    "cohere with normed heads, keys shared": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}, TP2),
    "falcon, one key for all": ("falcon", {"bias": True}, TP4),
    "falcon, one key each": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}, MIXED),
    "falcon with slopes": ("falcon", {"multi_query": False, "alibi": True}, MIXED),
    "falcon with slopes, one key for all": ("falcon", {"alibi": True}, TP2),
    "falcon with slopes, eager": ("falcon", {"alibi": True, "attn_implementation": "eager"}, TP2),
    "falcon, grouped": ("falcon", {**FALCON_GROUPED, "num_kv_heads": 2}, MIXED),
    "falcon, grouped, one norm": (
        "falcon",
        {**FALCON_GROUPED, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        TP2,
    ),
    "falcon, grouped, keys shared": ("falcon", {**FALCON_GROUPED, "num_kv_heads": 2}, TP4),
    "gemma3 with a head on its vision model": (
        "gemma3",
        {"vision_config": {"vision_use_head": True}},
        Layout(pp=2),
    ),
    "gemma3 over four stages": ("gemma3", {}, Layout(pp=4)),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}, TP2),
    "gptj, rotary in all of a head": ("gptj", {"rotary_dim": 8}, TP2),
    "opt with a narrow embedding": ("opt", {"word_embed_proj_dim": 16}, MIXED),
    "opt with norms behind": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, MIXED),
    "phi3 with grouped heads": ("phi3", {"num_key_value_heads": 2}, MIXED),
    "phi3, keys shared": ("phi3", {"num_key_value_heads": 2}, TP4),
    "phi3, one key for all": ("phi3", {"num_key_value_heads": 1}, MIXED),
    # Heads that the ranks do not divide are padded, see heads.py.
    "cohere, 6 heads, 3 keys": ("cohere", heads(6, 3), TP2),
    "cohere, 3 normed heads": ("cohere", heads(3, 3, hidden_size=24, use_qk_norm=True), MIXED),
    "cohere, 9 normed heads, 3 keys on 4 ranks": (
        "cohere",
        heads(9, 3, hidden_size=72, use_qk_norm=True),
        TP4,
    ),
    "llama, 3 heads": ("llama", heads(3, 3, attention_bias=True), MIXED),
    "llama, 3 heads on 4 ranks": ("llama", heads(3, 3), TP4),
    "llama, 3 heads, one key for all": ("llama", heads(3, 1, attention_bias=True), ZERO),
    "llama, 6 heads, 3 keys": ("llama", heads(6, 3), TP2),
    "llama, 6 heads, 3 keys on 4 ranks": ("llama", heads(6, 3), TP4),
    "qwen3, 6 heads, 2 keys on 4 ranks": ("qwen3", heads(6, 2), TP4),
    "mixtral, 3 heads, one key for all": ("mixtral", heads(3, 1), TP2),
    "deepseek_v3, 3 heads": ("deepseek_v3", {"num_attention_heads": 3, "num_key_value_heads": 3}, TP2),
    "phi3, 6 heads, 3 keys": (
        "phi3",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        TP2,
    ),
    "falcon, 3 heads, one key for all": (
        "falcon",
        {"hidden_size": 24, "num_attention_heads": 3, "bias": True},
        TP2,
    ),
    "falcon, 6 heads, 2 keys on 4 ranks, slopes": (
        "falcon",
        {
            **FALCON_GROUPED,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "alibi": True,
        },
        TP4,
    ),
    "arcee, whose table is derived, 6 heads, 2 keys on 4 ranks": ("arcee", heads(6, 2), TP4),
    "bloom, 3 heads": ("bloom", {"hidden_size": 24, "n_head": 3}, MIXED),
    "gpt2, 3 heads": ("gpt2", {"n_embd": 24, "n_head": 3}, MIXED),
    "gptj, 3 heads": ("gptj", {"n_embd": 24, "n_head": 3}, TP2),
    "gpt_neo, 3 heads": ("gpt_neo", {"hidden_size": 24, "num_heads": 3}, TP2),
    "gpt_neox, 3 heads": ("gpt_neox", {"hidden_size": 24, "num_attention_heads": 3}, TP2),
    "opt, 3 heads": ("opt", {"hidden_size": 24, "num_attention_heads": 3, "word_embed_proj_dim": 24}, TP2),
    "bert, 3 heads": ("bert", {"hidden_size": 24, "num_attention_heads": 3}, MIXED),
    "albert, 3 heads": ("albert", {"hidden_size": 24, "num_attention_heads": 3}, MIXED),
    "bart, 3 heads, and 6 of the decoder": (
        "bart",
        {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 6},
        TP4,
    ),
    "beit, 3 heads, biases of each layer": ("beit", {"hidden_size": 24, "num_attention_heads": 3}, MIXED),
    "beit, 3 heads, biases of all layers": (
        "beit",
        {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "use_relative_position_bias": False,
            "use_shared_relative_position_bias": True,
        },
        TP2,
    ),
    "blip-2, 3 heads of images, 5 of queries": (
        "blip-2",
        {
            "vision_config": {"hidden_size": 24, "num_attention_heads": 3},
            "qformer_config": {"hidden_size": 40, "num_attention_heads": 5, "encoder_hidden_size": 24},
        },
        TP2,
    ),
    "olmo2, 3 heads": ("olmo2", heads(3, 3), MIXED),
    "olmo2, 6 heads, 3 keys on 4 ranks": ("olmo2", heads(6, 3), TP4),
    "olmo2, 6 heads, 2 keys on 4 ranks": ("olmo2", heads(6, 2), TP4),
    "swin, 3 and 6 heads": ("swin", {"num_heads": [3, 6, 6], "embed_dim": 24}, TP4),
    "swinv2, 3 and 6 heads": ("swinv2", {"num_heads": [3, 6, 6], "embed_dim": 24}, TP2),
    "t5, 3 heads": ("t5", {"num_heads": 3}, MIXED),
    "t5, 6 heads on 4 ranks": ("t5", {"num_heads": 6}, TP4),
    "umt5, 3 heads": ("umt5", {"num_heads": 3}, ZERO),
    "whisper, 3 heads": (
        "whisper",
        {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        MIXED,
    ),
    "vit, 3 heads": ("vit", {"hidden_size": 24, "num_attention_heads": 3}, TP2),
    "blip-2 with a language model without an encoder": (
        "blip-2",
        {"text_config": {"model_type": "llama"}},
        MIXED,
    ),
    "sam without relative positions": ("sam", {"vision_config": {"use_rel_pos": False}}, TP2),
    "sam of four stages": ("sam", {}, STAGES_OF_FOUR),
    "sam, several stages a rank": ("sam", {}, STAGES_OF_RANKS),
    "blip-2 of four stages": ("blip-2", {}, STAGES_OF_FOUR),
    "blip-2, several stages a rank": ("blip-2", {}, STAGES_OF_RANKS),
    "umt5, biases of each block": ("umt5", {}, STAGES_OF_FOUR),
    "whisper, the encoder has several stages": ("whisper", {}, STAGES_OF_FOUR),
    "whisper, a rank holds stages of both": ("whisper", {}, STAGES_OF_RANKS),
    "whisper, the backward is split in two": ("whisper", {}, Layout(pp=2, schedule="zbh1")),
}
QUICK_VARIANTS = (
    "falcon, one key for all",
    "llama, 3 heads, one key for all",
    "opt with a narrow embedding",
    "blip-2 with a language model without an encoder",
)


def matching(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Retrieval by its matching head, whose Q-Former sees image and text at once."""
    return {**make_batch(*args, **kwargs), "use_image_text_matching_head": True}


def variant_rows() -> Iterator[ParityRow]:
    """What the settings of one model type change."""
    for name, (model_type, settings, layout) in VARIANTS.items():
        choice = ModelChoice(model_type=model_type, settings=tuple(settings.items()))
        yield ParityRow(name=name, choice=choice, layout=layout, quick=name in QUICK_VARIANTS)
    sounds = ModelChoice(
        model_type="whisper", head="audio_classification", settings=(("use_weighted_layer_sum", True),)
    )
    yield ParityRow(name="whisper classified by all layers", choice=sounds, layout=TP2)
    retrieval = ModelChoice(model_type="blip-2", head="zero_shot_image")
    for layout in (TP2, Layout(pp=2)):
        yield ParityRow(
            name="blip-2 matching images and text", choice=retrieval, layout=layout, batch=matching
        )


# Batches: packed texts, and queries that see no key.

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
# Some have windows of 5 tokens, some cap their scores, and the last two see both ways.
EAGER_TYPES = ("llama", "gemma2", "gemma3_text", "mistral", "gpt2", "bert", "roberta")
FLASH = (("attn_implementation", "flash_attention_2"),)


def packed(choice: ModelChoice, **size: Any) -> dict[str, Any]:
    """Two texts in each row, by restarting position_ids and without an attention_mask.

    transformers keeps such texts apart in a call without a cache, and the call's use_cache, or else the config, says
    whether there is one. So it is under a layout: what `model(**batch)` means does not depend on Echelon.
    """
    batch = make_batch(choice, **size)
    rows, length = batch.pop("attention_mask").shape
    batch["labels"] = batch["input_ids"]
    positions = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])
    return batch | {"position_ids": positions.expand(rows, -1)}


def packed_without_a_cache(choice: ModelChoice, **size: Any) -> dict[str, Any]:
    """The same, called without a cache."""
    return packed(choice, **size) | {"use_cache": False}


def packed_in_one_row(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Microbatches of one row: flash attention asks nothing of a cache, but whether a batch is one row."""
    return packed(choice, num_samples=3, seed=seed)


def with_unseen_keys(choice: ModelChoice, **size: Any) -> dict[str, Tensor]:
    """A batch with queries that see no key: padded on the left, or with a mask of zeros for the last sample.

    Eager attention gives such a query the mean of all values, torch's own gives it 0; so must a ring.
    """
    batch = make_batch(choice, **size)
    if choice.head_name == "causal":
        return {name: value.flip(-1) for name, value in batch.items()}
    mask = batch["attention_mask"].clone()
    mask[-1] = 0
    return batch | {"attention_mask": mask}


def batch_rows() -> Iterator[ParityRow]:
    """Packed texts, and queries that see no key, by eager, torch's and flash attention."""
    for model_type in ("llama", "gemma2", "qwen2_moe"):
        choice = ModelChoice(model_type=model_type)
        for layout in PACKED_LAYOUTS if choice == LLAMA else PACKED_LAYOUTS[:3]:
            quick = choice == LLAMA and layout == RING
            yield ParityRow(
                name=f"packed {model_type}", choice=choice, layout=layout, batch=packed, quick=quick
            )
            yield ParityRow(
                name=f"packed {model_type} called without a cache",
                choice=choice,
                layout=layout,
                batch=packed_without_a_cache,
            )
            yield ParityRow(
                name=f"packed {model_type} built without a cache",
                choice=replace(choice, settings=(("use_cache", False),)),
                layout=layout,
                batch=packed,
            )
    eager = [(each, RING) for each in EAGER_TYPES]
    eager += [*product(EAGER_TYPES[:2], UNSEEN_LAYOUTS), ("gpt_oss", ULYSSES)]  # with sinks
    for model_type, layout in eager:
        yield ParityRow(
            name=f"unseen keys {model_type} eager",
            choice=EagerChoice(model_type=model_type),
            layout=layout,
            batch=with_unseen_keys,
            quick=(model_type, layout) == ("gemma2", RING),
        )
    for model_type, layout in product(("llama", "mistral", "roberta"), (RING, ULYSSES)):
        yield ParityRow(
            name=f"unseen keys {model_type}",
            choice=ModelChoice(model_type=model_type),
            layout=layout,
            batch=with_unseen_keys,
        )


def flash_rows() -> Iterator[ParityRow]:
    """The batches of `batch_rows` with a stand-in of the package flash-attn."""
    for layout in (RING, ULYSSES):
        for batch in (packed, packed_in_one_row):
            choice = replace(LLAMA, settings=FLASH)
            name = f"{batch.__name__} llama flash"
            yield ParityRow(
                name=name,
                choice=choice,
                layout=layout,
                batch=batch,
                within=installed_flash_attn,
                marks=(LOOKS_FOR_FLASH_ATTN,),
            )
        for choice in (replace(LLAMA, settings=FLASH), replace(BERT, settings=FLASH)):
            yield ParityRow(
                name=f"unseen keys {choice.model_type} flash",
                choice=choice,
                layout=layout,
                batch=with_unseen_keys,
                within=installed_flash_attn,
                marks=(LOOKS_FOR_FLASH_ATTN,),
            )
