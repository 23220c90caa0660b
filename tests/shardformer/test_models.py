"""Settings of models, and what users do with them, split over two ranks: loss and gradients of the whole model.

Every model type and head is a row of tests/contract.
"""

from functools import partial
from typing import Any

import pytest
import torch

from ..pool import Pool
from ..slow import slow_row
from .compare import batch_for, build, named, require_same_training

SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_key_value_heads": 4}
GATED = {"feed_forward_proj": "gated-gelu"}
# Class, attention, settings. Rows of contract/variant_rows.py have more of them, under plugins.
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("LlamaForCausalLM", "eager", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", "sdpa", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("LlamaForCausalLM", "sdpa", {"head_dim": 6, "num_key_value_heads": 2}),
    ("LlamaForCausalLM", "sdpa", {"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 2}),
    ("MistralForCausalLM", "eager", {"sliding_window": 4, "num_key_value_heads": 2}),
    ("Qwen2ForCausalLM", "sdpa", SLIDING),
    ("Qwen3ForCausalLM", "eager", {"head_dim": 6, "num_key_value_heads": 1}),
    ("GPT2LMHeadModel", "sdpa", {"scale_attn_by_inverse_layer_idx": True}),
    ("GPT2LMHeadModel", "sdpa", {"scale_attn_weights": False, "n_inner": None}),
    ("GPT2LMHeadModel", "eager", {"reorder_and_upcast_attn": True}),
    ("BertForSequenceClassification", "sdpa", {"chunk_size_feed_forward": 1, "num_labels": 5}),
    ("BertLMHeadModel", "eager", {"is_decoder": True}),
    ("T5ForConditionalGeneration", "sdpa", {"tie_word_embeddings": False, **GATED}),  # T5 1.1
    ("MT5ForConditionalGeneration", "eager", GATED),
)


def check_cases(interval: int) -> None:
    for name, attention, settings in CASES[::interval]:
        model = build(name, attention=attention, **settings)
        with named((name, attention, settings)):
            require_same_training(model, batch_for(model))


def token_types() -> None:
    model = build("GPT2LMHeadModel")
    batch = batch_for(model)
    batch["token_type_ids"] = (batch["input_ids"] * 7) % 100
    require_same_training(model, batch)
    model = build("BertForSequenceClassification")
    batch = batch_for(model)
    batch["token_type_ids"] = (torch.arange(13) > 6).long().expand(3, -1)
    require_same_training(model, batch)


def cross_attention() -> None:
    """Modules that are not in the table are replicated, with correct gradients: attention to another model's states."""
    for name in ("BertLMHeadModel", "GPT2LMHeadModel"):
        for attention in ("sdpa", "eager"):
            model = build(name, attention=attention, is_decoder=True, add_cross_attention=True)
            batch = batch_for(model)
            states = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(5))
            with named(f"{name} {attention}"):
                require_same_training(model, {**batch, "encoder_hidden_states": states})


def untied(model: Any) -> None:
    """Untie the head, in contradiction to the config."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)


def resized(model: Any) -> None:
    model.resize_token_embeddings(117, mean_resizing=False)


def frozen_below(model: Any) -> None:
    model.get_input_embeddings().requires_grad_(False)
    model.get_submodule("model.layers.0" if hasattr(model, "model") else "encoder").requires_grad_(False)


def frozen_but_few(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[0].self_attn.k_proj.requires_grad_(True)
    model.model.layers[1].mlp.requires_grad_(True)


def resized_and_frozen() -> None:
    for name, change, settings in (
        ("LlamaForCausalLM", resized, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("LlamaForCausalLM", untied, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("LlamaForCausalLM", frozen_below, {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("LlamaForCausalLM", frozen_but_few, {"num_key_value_heads": 1, "tie_word_embeddings": False}),
        ("T5ForConditionalGeneration", resized, {}),  # makes one module of its embeddings
        ("T5ForConditionalGeneration", untied, {"tie_word_embeddings": False}),
        ("T5ForConditionalGeneration", frozen_below, {}),
    ):
        model: Any = build(name, **settings)
        batch = batch_for(model)
        change(model)
        if change is resized:
            batch["input_ids"][0, 3] = 116
        with named((name, change.__name__)):
            require_same_training(model, batch)


def embedded_inputs() -> None:
    model = build("LlamaForCausalLM", num_key_value_heads=2)
    batch = batch_for(model)
    ids = batch.pop("input_ids")
    states = torch.randn(*ids.shape, 32, generator=torch.Generator().manual_seed(5))
    require_same_training(model, {**batch, "inputs_embeds": states})


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(partial(check_cases, 3), id="every third case"),
        slow_row(partial(check_cases, 1), id="all cases"),
        *(token_types, cross_attention, resized_and_frozen, embedded_inputs),
    ],
)
def test_loss_and_gradients_equal_those_of_the_unsharded_model(pool: Pool, function: Any) -> None:
    pool.run(2, function)
