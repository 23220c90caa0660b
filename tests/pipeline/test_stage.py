"""Stage cutting, in one process: stages in turn give the whole model's loss and gradients, bit for bit."""

import pytest
import torch
import transformers as T
from torch import nn

from echelon.pipeline.plan import StagePlan
from echelon.pipeline.stage import cut_stages, local_stages

from .stages import cut, plan_of, require_same

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


def build(name: str, **settings: object) -> nn.Module:
    """A model of MODELS in training mode."""
    config, class_name = MODELS[name]
    torch.manual_seed(0)
    return getattr(T, class_name)(type(config)(**{**config.to_dict(), **settings})).train()


@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_whole_models_loss_and_gradients_bit_for_bit(name: str) -> None:
    model = build(name)
    plan, bounds = plan_of(model), [0, 1, 3, 5]
    ranks = cut(model, plan, (0, 1, 2), bounds)
    require_same(model, ranks, batch_for(model))
    for stage, part in zip(ranks.stages, ranks.parts, strict=True):
        for key, _ in part.named_parameters():
            assert plan.stages_of(model, key, bounds) == [stage.index], key


PLACEMENTS = {
    "interleaved": (0, 1, 0, 1),
    "v": (0, 1, 1, 0),
    "one process": (0, 0, 0, 0),
    "three": (1, 0, 2, 0),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_several_stages_of_a_rank_give_the_whole_models_gradients_bit_for_bit(
    name: str, placement: tuple[int, ...], tied: bool
) -> None:
    layers = "n_layer" if name.startswith("GPT2") else "num_hidden_layers"
    model = build(name, **{layers: 7, "tie_word_embeddings": tied})
    bounds = [0, 1, 3, 6, 7]
    ranks = cut(model, plan_of(model), placement, bounds)
    names = [key for part in ranks.parts for key, _ in part.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(key for key, _ in model.named_parameters(remove_duplicate=False))
    for part in ranks.parts:
        assert part.state_dict().keys() <= model.state_dict().keys()
    require_same(model, ranks, batch_for(model))
    at_rest = [dict(part.named_parameters()) for part in ranks.parts]
    assert [len(held) for held in at_rest] == [len(list(part.parameters())) for part in ranks.parts]


def test_a_stage_lists_the_layers_and_parameters_that_its_forward_uses() -> None:
    model = build("LlamaForCausalLM", num_hidden_layers=4, tie_word_embeddings=True)
    (part,), stages = cut(model, plan_of(model), (0, 0, 0, 0), [0, 1, 2, 3, 4])
    names = {parameter: name for name, parameter in part.named_parameters()}
    for index, stage in enumerate(stages):
        assert stage.layers == [part.model.layers[index]]
        uses = {names[parameter] for parameter in stage.parameters()}
        own = {name for name in names.values() if f"layers.{index}." in name}
        ends = {0: {"model.embed_tokens.weight"}, 3: {"model.embed_tokens.weight", "model.norm.weight"}}
        assert uses == own | ends.get(index, set())
        assert len(stage.parameters()) == len(uses)


def test_the_tree_is_whole_again_after_a_stage_that_failed() -> None:
    model = build("GPT2LMHeadModel")
    (part,), stages = cut(model, plan_of(model), (0, 0), [0, 2, 5])
    before = dict(part.named_modules())
    with pytest.raises(ValueError, match="input_ids"):
        stages[0].forward({"input_ids": None}, ())
    assert dict(part.named_modules()) == before


def test_modes_hooks_and_moves_reach_every_stage_of_a_rank() -> None:
    model = build("GPT2LMHeadModel", resid_pdrop=0.5)
    (part,), stages = cut(model, plan_of(model), (0, 0), [0, 2, 5])
    called = []
    part.transformer.h[4].register_forward_hook(lambda *_: called.append(part.transformer.h[4].training))
    part.eval()
    batch = batch_for(part)
    (sent,) = stages[0].forward(batch, ())
    expected = model.eval()(**batch).loss
    assert torch.equal(stages[1].forward(batch, (sent,)).loss, expected)
    assert called == [False]
    part.double()
    assert {parameter.dtype for stage in stages for parameter in stage.parameters()} == {torch.float64}


def test_no_stage_keeps_a_cache_of_keys_and_values() -> None:
    model = build("LlamaForCausalLM")
    whole = local_stages(model)[0].forward(batch_for(model), ())
    assert model(**batch_for(model)).past_key_values is not None
    assert whole.past_key_values is None


def test_an_uncut_model_is_one_stage() -> None:
    model = build("BertModel")
    (stage,) = local_stages(model).values()
    assert (stage.index, stage.num_stages, stage.is_first, stage.is_last) == (0, 1, True, True)
    assert stage.parameters() == list(model.parameters())


def test_a_stand_in_answers_attributes_but_holds_no_parameters() -> None:
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL))
    plan = StagePlan(layers="model.layers", entry=("model.embed_tokens",))
    cut_stages(model, plan, stages=[1], bounds=[0, 2, 5])
    assert model.model.embed_tokens.embedding_dim == 32
    assert model.model.layers[0].self_attn.head_dim == 8
    assert {name.split(".")[2] for name, _ in model.named_parameters() if "layers" in name} == {"2", "3", "4"}


def test_stand_ins_compute_where_the_model_is_moved_next() -> None:
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL))
    plan = StagePlan(layers="model.layers", entry=("model.embed_tokens",))
    cut_stages(model, plan, stages=[1], bounds=[0, 2, 5], device=torch.device("meta"))
    assert model.model.layers[0].device == torch.device("meta")
