"""Stage cutting, in one process: stages in turn give the whole model's loss and gradients, bit for bit."""

import copy

import pytest
import torch
import transformers as T
from torch import nn

from echelon.pipeline.cut import Stage, cut_stage
from echelon.pipeline.plan import StagePlan, layer_bounds, layer_faults, spread_layers
from echelon.shardformer import policy_for

SMALL = dict(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=5,
    num_attention_heads=4,
    intermediate_size=64,
    tie_word_embeddings=False,
    classifier_dropout=0.0,
    pad_token_id=0,
)
GPT2 = dict(vocab_size=100, n_embd=32, n_layer=5, n_head=4, tie_word_embeddings=False, pad_token_id=0)
NO_DROP = dict(
    classifier_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0
)
BERT_NO_DROP = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def batch_for(model: nn.Module) -> dict[str, torch.Tensor]:
    name, ids = type(model).__name__, text()
    if "SequenceClassification" in name or "NextSentence" in name:
        return {**ids, "labels": torch.tensor([0, 1])}
    if "MultipleChoice" in name:
        return {key: value[:, None].repeat(1, 3, 1) for key, value in ids.items()} | {
            "labels": torch.tensor([0, 2])
        }
    if "TokenClassification" in name:
        return {**ids, "labels": ids["input_ids"] % 2}
    if "QuestionAnswering" in name:
        return {**ids, "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    if "ForPreTraining" in name:
        return {**ids, "labels": ids["input_ids"], "next_sentence_label": torch.tensor([0, 1])}
    if name.endswith("Model") and "LMHead" not in name and "DoubleHeads" not in name:
        return ids
    return {**ids, "labels": ids["input_ids"]}


def scalar(outputs: object) -> torch.Tensor:
    loss = getattr(outputs, "loss", None)
    return outputs.last_hidden_state.square().mean() if loss is None else loss  # type: ignore[attr-defined]


MODELS = {
    name: (config_class(**settings), name)
    for config_class, settings, names in (
        (T.LlamaConfig, SMALL | {"num_key_value_heads": 2}, ["LlamaForCausalLM", "LlamaModel"]),
        (T.LlamaConfig, SMALL, ["LlamaForSequenceClassification", "LlamaForTokenClassification"]),
        (T.MistralConfig, SMALL | {"num_key_value_heads": 2}, ["MistralForCausalLM"]),
        (T.Qwen2Config, SMALL | {"num_key_value_heads": 2}, ["Qwen2ForCausalLM"]),
        (T.Qwen3Config, SMALL | {"num_key_value_heads": 2, "head_dim": 8}, ["Qwen3ForCausalLM"]),
        (
            T.BertConfig,
            SMALL | BERT_NO_DROP,
            [
                "BertModel",
                "BertForPreTraining",
                "BertForMaskedLM",
                "BertForNextSentencePrediction",
                "BertForSequenceClassification",
                "BertForMultipleChoice",
                "BertForTokenClassification",
                "BertForQuestionAnswering",
            ],
        ),
        (T.BertConfig, SMALL | BERT_NO_DROP | {"is_decoder": True}, ["BertLMHeadModel"]),
        (
            T.GPT2Config,
            GPT2 | NO_DROP,
            [
                "GPT2Model",
                "GPT2LMHeadModel",
                "GPT2ForSequenceClassification",
                "GPT2ForTokenClassification",
                "GPT2ForQuestionAnswering",
            ],
        ),
    )
    for name in names
}


@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_whole_models_loss_and_gradients_bit_for_bit(name: str) -> None:
    config, class_name = MODELS[name]
    torch.manual_seed(0)
    model = getattr(T, class_name)(config).train()
    batch = batch_for(model)
    policy = policy_for(model)
    policy.set_model(model)
    plan = policy.stage_plan()
    assert plan is not None

    whole = copy.deepcopy(model)
    expected = scalar(whole(**batch))
    expected.backward()

    bounds = [0, 1, 3, 5]
    stages = []
    for index in range(3):
        part = copy.deepcopy(model)
        stages.append(
            Stage(part, cut_stage(part, plan, stage=index, bounds=bounds), index=index, num_stages=3)
        )
    leaves, outputs, received = [], [], ()
    for stage in stages:
        outputs.append(stage.forward(batch, received))
        if not stage.is_last:
            received = tuple(tensor.detach().requires_grad_() for tensor in outputs[-1])
            leaves.append(received)
    loss = scalar(outputs[-1])
    assert loss.item() == expected.item()

    loss.backward()
    for output, leaf in zip(reversed(outputs[:-1]), reversed(leaves), strict=True):
        torch.autograd.backward(output, [tensor.grad for tensor in leaf])
    reference = dict(whole.named_parameters())
    seen = {}
    for stage in stages:
        for key, parameter in stage.model.named_parameters():
            assert plan.stage_of(key, bounds) == stage.index, f"{key} is held by stage {stage.index}"
            seen[key] = parameter.grad
    assert set(seen) == set(reference)
    for key, parameter in reference.items():
        if parameter.grad is None:
            assert seen[key] is None, key
        else:
            assert torch.equal(seen[key], parameter.grad), key


def test_layers_are_spread_evenly_and_the_extra_ones_go_to_the_middle() -> None:
    assert spread_layers(8, 4) == [2, 2, 2, 2]
    assert spread_layers(9, 4) == [2, 3, 2, 2]
    assert spread_layers(10, 4) == [2, 3, 3, 2]
    assert layer_bounds([2, 3, 2]) == [0, 2, 5, 7]


def test_a_layer_count_that_does_not_fit_says_what_would() -> None:
    assert "pp_size of at most 3" in layer_faults(3, 4, None)[0]
    assert "[1, 2, 1] would" in layer_faults(4, 3, [2, 2, 1])[0]
    assert layer_faults(4, 3, [2, 1, 1]) == []


def test_a_stand_in_answers_attributes_but_holds_no_parameters() -> None:
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL))
    plan = StagePlan(layers="model.layers", entry=("model.embed_tokens",))
    cut_stage(model, plan, stage=1, bounds=[0, 2, 5])
    assert model.model.embed_tokens.embedding_dim == 32
    assert model.model.layers[0].self_attn.head_dim == 8
    assert {name.split(".")[2] for name, _ in model.named_parameters() if "layers" in name} == {"2", "3", "4"}
