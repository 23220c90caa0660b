"""What the settings of one model type change about its layers, beside one process."""

import pytest

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool

TP2, TP4, MIXED, ZERO = Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1)
FALCON_GROUPED = {"new_decoder_architecture": True, "bias": True}


def heads(query: int, key_value: int) -> dict[str, object]:
    """Settings of so many heads."""
    return {"hidden_size": 48, "num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": 8}


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
    # Heads that the ranks do not divide: heads of zeros are added, see head_order.py.
    "cohere, 6 heads, 3 keys": ("cohere", heads(6, 3), TP2),
    "cohere, 3 normed heads": ("cohere", heads(3, 3) | {"hidden_size": 24, "use_qk_norm": True}, MIXED),
    "cohere, 9 normed heads, 3 keys on 4 ranks": (
        "cohere",
        heads(9, 3) | {"hidden_size": 72, "use_qk_norm": True},
        TP4,
    ),
    "llama, 3 heads": ("llama", {**heads(3, 3), "attention_bias": True}, MIXED),
    "llama, 3 heads on 4 ranks": ("llama", heads(3, 3), TP4),
    "llama, 3 heads, one key for all": ("llama", {**heads(3, 1), "attention_bias": True}, ZERO),
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
}


def rows() -> list[object]:
    """A row per variant; those with a narrow embedding or shared keys are quick."""
    quick = (
        "opt with a narrow embedding",
        "falcon, one key for all",
        "phi3, keys shared",
        "falcon with slopes",
        "llama, 3 heads, one key for all",
        "gpt2, 3 heads",
    )
    return [
        pytest.param(model_type, settings, layout, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, (model_type, settings, layout) in VARIANTS.items()
    ]


@pytest.mark.parametrize(("model_type", "settings", "layout"), rows())
def test_a_variant_trains_as_one_process_does(
    pool: Pool, model_type: str, settings: dict[str, object], layout: Layout
) -> None:
    choice = ModelChoice(model_type=model_type, settings=tuple(settings.items()))
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0)
    assert reports[0].departure is None
