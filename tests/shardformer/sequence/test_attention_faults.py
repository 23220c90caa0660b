"""Which models cannot attend over split sequences, and what is said."""

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from echelon.shardformer.sequence.attention_faults import sequence_attention_faults
from echelon.verify.models import ModelChoice

OPTION = "sequence_parallelism_mode"


# In older releases of transformers the attention of these has not come to the interface.
CAME_LATER = ("t5", "swin")
IS_OLDER = "qwen3_5_text" not in CONFIG_MAPPING


def faults(mode: str, model_type: str, **settings: object) -> list[str]:
    if model_type not in CONFIG_MAPPING or (IS_OLDER and model_type in CAME_LATER):
        pytest.skip("this release of transformers has no such model, or computes its attention otherwise")
    model = ModelChoice(model_type=model_type, settings=tuple(settings.items())).build_on_meta()
    return sequence_attention_faults(model, mode, OPTION)


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "albert", "mixtral", "vit"])
def test_models_of_the_interface_can(model_type: str, mode: str) -> None:
    assert faults(mode, model_type) == []


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "bloom",
            {},
            "no layers of BloomForCausalLM call attention through transformers' AttentionInterface",
        ),
        ("t5", {}, "T5Attention counts positions by itself"),
        ("bart", {}, "BartDecoderLayer attends to another sequence than its own (encoder_attn)"),
        ("bert", {"is_decoder": True, "add_cross_attention": True}, "(crossattention)"),
        ("qwen3_5_text", {}, "Qwen3_5DecoderLayer mixes positions by Qwen3_5GatedDeltaNet"),
        ("swin", {}, "SwinRelativePositionBias counts positions by itself"),
        (
            "llama",
            {"output_attentions": True, "attn_implementation": "eager"},
            "config.output_attentions=False",
        ),
        (
            "gpt2",
            {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
            "config.reorder_and_upcast_attn",
        ),
        (
            "llama",
            {"attn_implementation": "flex_attention"},
            "can be one of eager, sdpa, flash_attention_2, xformers",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(
    model_type: str, mode: str, settings: dict[str, object], reason: str
) -> None:
    found = faults(mode, model_type, **settings)
    assert any(reason in each for each in found), found
    assert all(each.startswith(f"{OPTION}: ") for each in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("granite_swa", "GraniteSWAAttention has sinks"),
    ],
)
def test_what_the_ring_lacks_heads_can_do(model_type: str, reason: str) -> None:
    assert faults("all_to_all", model_type) == []
    (*_, fault) = faults("ring_attn", model_type)
    assert reason in fault and "'all_to_all'" in fault


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_scores_may_be_capped(mode: str) -> None:
    assert faults(mode, "gemma2") == []


def test_only_layers_that_are_to_be_split_are_looked_at() -> None:
    model = ModelChoice(model_type="bart").build_on_meta()
    encoder = list(model.get_submodule("model.encoder.layers").children())
    found = sequence_attention_faults(model, "all_to_all", OPTION, encoder)
    assert found and not any("BartDecoder" in each for each in found), found


def test_a_model_of_another_kind_is_refused() -> None:
    (fault,) = sequence_attention_faults(nn.Linear(1, 1), "all_to_all", OPTION)
    assert "no layers of Linear" in fault
