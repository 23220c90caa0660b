"""Whole models split over 2 and 4 ranks: the loss and every gradient are those of the model in one piece."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ..pool import Pool
from .compare import batch_for, build, named, require_same_training

LLAMA_LIKE = dict(num_key_value_heads=2, tie_word_embeddings=False)
BERT_HEADS = (
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)


@dataclass(frozen=True)
class Case:
    """A model: its class, how its attention is computed, and its settings."""

    class_name: str
    attention: str = "sdpa"
    settings: dict[str, Any] = field(default_factory=dict)


def llama(class_name: str = "LlamaForCausalLM", attention: str = "sdpa", **settings: Any) -> Case:
    return Case(class_name, attention, {**LLAMA_LIKE, **settings})


def gpt2(class_name: str = "GPT2LMHeadModel", attention: str = "sdpa", **settings: Any) -> Case:
    return Case(class_name, attention, {"tie_word_embeddings": False, **settings})


def t5(class_name: str = "T5ForConditionalGeneration", attention: str = "sdpa", **settings: Any) -> Case:
    return Case(class_name, attention, settings)


T5_HEADS = (
    "Model",
    "EncoderModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
GATED = {"feed_forward_proj": "gated-gelu"}

CASES = {
    "llama": [
        llama(num_key_value_heads=heads, attention=attention)
        for heads in (4, 2, 1)
        for attention in ("sdpa", "eager")
    ]
    + [
        llama(tie_word_embeddings=True, num_key_value_heads=1),
        llama(attention_bias=True, mlp_bias=True, num_key_value_heads=1),
        llama(head_dim=6, num_key_value_heads=2),
        llama(num_attention_heads=8, head_dim=4, num_key_value_heads=2),
        llama("LlamaModel"),
        llama("LlamaForSequenceClassification"),
        llama("LlamaForTokenClassification"),
        llama("LlamaForQuestionAnswering"),
    ],
    "mistral and qwen": [
        llama("MistralForCausalLM", sliding_window=4),
        llama("MistralForCausalLM", "eager", sliding_window=4, tie_word_embeddings=True),
        llama("Qwen2ForCausalLM", num_key_value_heads=1),
        llama("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=1),
        llama("Qwen3ForCausalLM", head_dim=6),
        llama("Qwen3ForCausalLM", "eager", head_dim=6, num_key_value_heads=1, tie_word_embeddings=True),
    ],
    "gpt2": [
        gpt2(),
        gpt2(attention="eager"),
        gpt2(tie_word_embeddings=True),
        gpt2(scale_attn_by_inverse_layer_idx=True),
        gpt2(scale_attn_weights=False),
        gpt2(attention="eager", reorder_and_upcast_attn=True),
        gpt2("GPT2Model", n_inner=None),
        gpt2("GPT2DoubleHeadsModel", tie_word_embeddings=True),
        gpt2("GPT2ForSequenceClassification"),
        gpt2("GPT2ForTokenClassification"),
        gpt2("GPT2ForQuestionAnswering"),
    ],
    "bert": [
        Case(
            name,
            settings={"tie_word_embeddings": False, "is_decoder": "LMHead" in name}
            | ({"num_labels": 2} if "Question" in name else {}),
        )
        for name in BERT_HEADS
    ]
    + [
        Case("BertForMaskedLM", "eager", {"tie_word_embeddings": True}),
        Case("BertForPreTraining", settings={"tie_word_embeddings": True}),
        Case("BertLMHeadModel", settings={"tie_word_embeddings": True, "is_decoder": True}),
        Case("BertForSequenceClassification", settings={"chunk_size_feed_forward": 1, "num_labels": 5}),
        Case("BertForSequenceClassification", settings={"problem_type": "regression", "num_labels": 1}),
    ],
    "t5": [
        t5(),
        t5(attention="eager"),
        t5(tie_word_embeddings=False, **GATED),  # the head's input is not scaled, as in T5 1.1
        *(t5(f"T5{head}", **({"num_labels": 2} if "Question" in head else {})) for head in T5_HEADS),
        t5("MT5ForConditionalGeneration", **GATED),
        t5("MT5EncoderModel", "eager"),
        t5("UMT5ForConditionalGeneration", **GATED),
        t5("UMT5Model", "eager"),
    ],
}


def check(case: Case) -> None:
    model = build(case.class_name, attention=case.attention, **case.settings)
    batch = batch_for(model)
    if case.settings.get("problem_type") == "regression":
        batch["labels"] = torch.tensor([0.5, -1.0, 2.0])
    require_same_training(model, batch)


def check_all(cases: list[Case]) -> None:
    for case in cases:
        with named(case):
            check(case)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CASES)
def test_loss_and_gradients_are_those_of_the_whole_model(pool: Pool, family: str, ranks: int) -> None:
    pool.run(ranks, check_all, CASES[family])


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
    """Modules that the table does not split are replicated, and right: attention over another model's states."""
    for name in ("BertLMHeadModel", "GPT2LMHeadModel"):
        for attention in ("sdpa", "eager"):
            model = build(name, attention=attention, is_decoder=True, add_cross_attention=True)
            batch = batch_for(model)
            states = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(5))
            with named(f"{name} {attention}"):
                require_same_training(model, {**batch, "encoder_hidden_states": states})


def resized_and_frozen() -> None:
    model = build("LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=True)
    batch = batch_for(model)
    model.resize_token_embeddings(117, mean_resizing=False)
    batch["input_ids"][0, 3] = 116
    batch["labels"][0, 3] = 116
    with named("resized"):
        require_same_training(model, batch)
    model = build("T5ForConditionalGeneration")
    model.resize_token_embeddings(117, mean_resizing=False)
    with named("T5 resized, which makes one module of its embeddings"):
        assert model.shared is model.encoder.embed_tokens
        require_same_training(model, batch_for(model))
    model = build("T5ForConditionalGeneration", tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)
    with named("T5 with a head of its own"):
        require_same_training(model, batch_for(model))
    model = build("T5ForConditionalGeneration")
    model.encoder.requires_grad_(False)
    with named("T5 with a frozen encoder"):
        require_same_training(model, batch_for(model))
    model = build("LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=False)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    with named("frozen embedding and layer"):
        require_same_training(model, batch_for(model))
    model = build("LlamaForCausalLM", num_key_value_heads=1, tie_word_embeddings=False)
    model.requires_grad_(False)
    model.model.layers[0].self_attn.k_proj.requires_grad_(True)
    model.model.layers[1].mlp.requires_grad_(True)
    with named("only some projections trained"):
        require_same_training(model, batch_for(model))
    model = build("LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)
    with named("untied by hand, whatever the config says"):
        require_same_training(model, batch_for(model))


def embedded_inputs() -> None:
    model = build("LlamaForCausalLM", num_key_value_heads=2)
    batch = batch_for(model)
    ids = batch.pop("input_ids")
    states = torch.randn(*ids.shape, 32, generator=torch.Generator().manual_seed(5))
    require_same_training(model, {**batch, "inputs_embeds": states})


@pytest.mark.parametrize("function", [token_types, cross_attention, resized_and_frozen, embedded_inputs])
def test_what_users_do_with_models_changes_no_number(pool: Pool, function: Any) -> None:
    pool.run(2, function)
