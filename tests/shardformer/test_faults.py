"""What is refused, and what the refusal says: all reasons at once, on models without memory, without processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from echelon.pipeline.plan import StagePlan
from echelon.shardformer import RegionDropout, Table, model_types, policy_for, register, table_for
from echelon.shardformer import table as table_module
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.decoders import GPT2, LLAMA
from echelon.shardformer.tables.encoder_decoders import T5

from . import compare

# A table that does not say what heads of zeros could be added to.
UNPADDED = replace(LLAMA, attention={})


def on_meta(class_name: str, **settings: Any) -> nn.Module:
    model_class = getattr(transformers, class_name)
    base = compare.BASES.get(model_class.config_class.model_type, compare.TINY)
    with torch.device("meta"):
        return model_class(model_class.config_class(**{**base, **settings}))


def faults(model: nn.Module, **sizes: Any) -> list[str]:
    policy = policy_for(model)
    policy.set_model(model)
    return policy.faults(**sizes)


def require_one(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0], found[0]


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 1}),
        ("MistralForCausalLM", {"num_key_value_heads": 2}),
        ("Qwen2ForCausalLM", {"num_key_value_heads": 4}),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 4, "head_dim": 8}),
        ("GPT2LMHeadModel", {}),
        ("GPT2ForSequenceClassification", {}),
        ("BertForPreTraining", {}),
        ("BertModel", {}),
    ],
)
def test_what_works_is_not_refused(class_name: str, settings: dict[str, Any]) -> None:
    model = on_meta(class_name, **settings)
    for tp_size in (1, 2, 4):
        for pp_size in (1, 2):
            assert faults(model, tp_size=tp_size, num_stages=pp_size) == []


@pytest.mark.parametrize("head", ["ForConditionalGeneration", "EncoderModel", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_an_encoder_decoder_is_split_and_cut(family: str, head: str) -> None:
    model = on_meta(family + head)
    assert [faults(model, tp_size=tp_size, num_stages=2) for tp_size in (1, 2, 3, 4)] == [[], [], [], []]


def test_what_is_optional_may_be_missing_and_nothing_else_may() -> None:
    model = on_meta("T5Model")
    del model.decoder.block[1].layer[1].EncDecAttention.o
    require_one(
        faults(model, tp_size=2),
        "names 'layer.1.EncDecAttention.o' in a layer, and decoder.block.1 has no such module",
    )
    model = on_meta("T5Model")
    del model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    require_one(faults(model, tp_size=2), "encoder.block.0 has no such parameter")
    model = on_meta("T5Model")
    feed_forward = model.encoder.block[1].layer[1].DenseReluDense
    feed_forward.wi_2 = feed_forward.wi
    del feed_forward.wi
    require_one(faults(model, tp_size=2), "encoder.block.1.layer.1.DenseReluDense.wi_2.weight works on split")


def test_a_second_input_that_the_forward_does_not_take_is_refused() -> None:
    policy = TablePolicy(T5)  # umT5 names it otherwise
    policy.set_model(on_meta("UMT5Model", num_decoder_layers=1))
    require_one(
        policy.faults(tp_size=2),
        "the input 'key_value_states' of decoder.block.0.layer.1.EncDecAttention",
        "'encoder_hidden_states'",
    )


def test_a_relative_position_bias_that_is_shared_is_refused() -> None:
    model = on_meta("T5Model")
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    model.second_bias = nn.Embedding(*bias.weight.shape, device="meta")
    model.second_bias.weight = bias.weight
    require_one(faults(model, tp_size=2), "second_bias shares a weight with encoder.block.0.layer.0")


def test_heads_that_do_not_divide_say_which_sizes_would() -> None:
    policy = TablePolicy(UNPADDED)
    policy.set_model(on_meta("LlamaForCausalLM", num_attention_heads=8))
    found = policy.faults(tp_size=3)
    assert "num_attention_heads=8 is not divisible by tp_size=3: use one of tp_size=[1, 2, 4, 8]" in found


def test_key_value_heads_neither_dividing_nor_divided_say_which_sizes_would() -> None:
    policy = TablePolicy(UNPADDED)
    sizes = dict(hidden_size=48, num_attention_heads=12, num_key_value_heads=3, intermediate_size=48)
    policy.set_model(on_meta("LlamaForCausalLM", **sizes))
    require_one(
        policy.faults(tp_size=2),
        "num_key_value_heads=3 neither divides tp_size=2",
        "tp_size=[1, 3, 6, 12]",
    )
    assert policy.faults(tp_size=6) == []


def test_an_odd_width_is_refused_by_its_name() -> None:
    found = faults(on_meta("GPT2LMHeadModel", n_inner=49), tp_size=2)
    assert [fault.partition(" is ")[0] for fault in found] == [
        "transformer.h.*.mlp.c_fc",
        "transformer.h.*.mlp.c_proj",
    ]
    assert "49 wide, which is not divisible by tp_size=2: use one of tp_size=[1, 7, 49]" in found[0]


def test_too_few_layers_and_a_wrong_spread_are_refused() -> None:
    model = on_meta("LlamaForCausalLM")
    require_one(faults(model, num_stages=4), "2 layers and the pipeline 4 stages", "at most 2 stages")
    require_one(
        faults(model, num_stages=2, num_layers_per_stage=[2, 0]),
        "num_layers_per_stage=[2, 0]",
        "[1, 1] would",
    )


@pytest.mark.parametrize("setting", ["output_hidden_states", "output_attentions"])
def test_what_collects_over_all_layers_is_refused_under_a_pipeline(setting: str) -> None:
    model = on_meta("LlamaForCausalLM", attn_implementation="eager")
    setattr(model.config, setting, True)
    require_one(faults(model, num_stages=2), f"{setting}=True in the model's config", "use pp_size=1")


def test_attentions_of_a_part_of_the_heads_are_refused() -> None:
    model = on_meta("LlamaForCausalLM", attn_implementation="eager")
    model.config.output_attentions = True
    require_one(
        faults(model, tp_size=2), "output_attentions=True in the model's config", "its own heads alone"
    )


def test_all_faults_are_told_at_once() -> None:
    model = on_meta("LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2, intermediate_size=50)
    model.config.output_hidden_states = True
    policy = TablePolicy(UNPADDED)
    policy.set_model(model)
    told = "\n".join(policy.faults(tp_size=3, num_stages=3))
    for part in (
        "num_attention_heads=4",
        "num_key_value_heads=2",
        "mlp.down_proj is 50 wide",
        "2 layers and the pipeline 3 stages",
        "output_hidden_states",
    ):
        assert part in told


def test_a_model_without_a_table_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"use tp_size=1 and pp_size=1, register a Table of its layers \(docs/pol"
    ):
        policy_for(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"^sequence parallelism needs a table, and a Linear \(model_type=None\) has n"
    ):
        policy_for(nn.Linear(2, 2), sequences_alone=True)
    with torch.device("meta"):
        other = transformers.CodeGenModel(
            transformers.CodeGenConfig(n_embd=8, n_layer=1, n_head=2, rotary_dim=4)
        )
    with pytest.raises(
        ValueError, match=r"no table says how to split a CodeGenModel \(model_type='codegen'\)"
    ):
        policy_for(other)


class Adapted(nn.Linear):
    """A projection with a low-rank term of its own."""

    def __init__(self, native: nn.Linear) -> None:
        super().__init__(native.in_features, native.out_features, native.bias is not None, device="meta")
        self.down = nn.Linear(native.in_features, 2, bias=False, device="meta")


def test_adapters_in_the_place_of_projections_are_refused_and_not_lost() -> None:
    model = on_meta("LlamaForCausalLM")
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    require_one(
        faults(model, tp_size=2),
        "model.layers.0.mlp.up_proj (and 1 more like it) is a",
        "Adapted and not a plain",
    )
    assert faults(model, num_stages=2) == [], "a pipeline cuts between layers, and takes any"
    model = on_meta("LlamaForCausalLM")
    model.lm_head = Adapted(model.lm_head)
    require_one(faults(model, tp_size=2), "lm_head is a", "Adapted")


def test_a_parameter_among_split_activations_that_the_table_does_not_name_is_refused() -> None:
    model = on_meta("LlamaForCausalLM")
    model.model.layers[1].self_attn.gate = nn.Linear(32, 1, bias=False, device="meta")
    require_one(
        faults(model, tp_size=2), "model.layers.1.self_attn.gate.weight", "name its module in column, row"
    )
    # A norm per head: the table of llama is not that of qwen3.
    policy = TablePolicy(LLAMA)
    policy.set_model(on_meta("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8))
    told = policy.faults(tp_size=2)
    assert len(told) == 2
    assert "self_attn.q_norm.weight (and 1 more like it) works on split activations" in told[0]


def test_hooks_on_what_is_replaced_are_refused_and_not_lost() -> None:
    model = on_meta("LlamaForCausalLM")
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output)
    require_one(faults(model, tp_size=2), "model.embed_tokens has hooks", "after the model is split")


def test_a_layer_that_shares_a_weight_with_a_split_one_is_refused() -> None:
    model = on_meta("LlamaForCausalLM", tie_word_embeddings=False)
    model.second_head = nn.Linear(32, compare.VOCABULARY, bias=False, device="meta")
    model.second_head.weight = model.lm_head.weight
    require_one(faults(model, tp_size=2), "second_head shares a weight with lm_head")


def test_integer_weights_are_refused() -> None:
    model = on_meta("LlamaForCausalLM")
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    require_one(
        faults(model, tp_size=2), "model.layers.0.mlp.up_proj has a weight of Parameter in torch.int8"
    )


def test_an_embedding_with_a_maximal_norm_is_refused() -> None:
    model = on_meta("LlamaForCausalLM", tie_word_embeddings=False)
    model.set_input_embeddings(nn.Embedding(compare.VOCABULARY, 32, max_norm=1.0, device="meta"))
    require_one(faults(model, tp_size=2), "model.embed_tokens has max_norm")


def test_layers_that_differ_are_refused() -> None:
    model = on_meta("GPT2LMHeadModel")
    other = on_meta("GPT2LMHeadModel", n_inner=64)
    model.transformer.h[1] = other.transformer.h[1]
    found = faults(model, tp_size=2)
    assert len(found) == 2
    assert "transformer.h.*.mlp.c_fc differs in width between layers, [(32, 48), (32, 64)]" in found[0]


class FusedLoss(transformers.LlamaForCausalLM):
    """Computes its loss from the head's weight, as fused losses do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), labels.flatten())


def test_a_forward_that_reads_the_weight_of_the_head_is_refused() -> None:
    with torch.device("meta"):
        model = FusedLoss(transformers.LlamaConfig(**compare.TINY))
    require_one(faults(model, tp_size=2), "the forward of this FusedLoss reads a weight itself")


def test_names_that_match_nothing_are_refused() -> None:
    policy = TablePolicy(GPT2)
    policy.set_model(on_meta("LlamaForCausalLM"))
    assert policy.faults(tp_size=2)[0].startswith(
        "the stage plan names 'model.h', and this LlamaForCausalLM has no"
    )
    settings = {**vars(LLAMA), "column": (*LLAMA.column, "mlp.side_proj")}
    policy = TablePolicy(Table(**settings))
    policy.set_model(on_meta("LlamaForCausalLM"))
    require_one(policy.faults(tp_size=2), "names 'mlp.side_proj' in a layer", "model.layers.0 has no such")


def test_numbers_that_no_config_tells_are_asked_for_by_name() -> None:
    model = on_meta("LlamaForCausalLM")
    model.config.num_key_value_heads = None
    policy = TablePolicy(LLAMA)
    policy.set_model(model)
    require_one(
        policy.faults(tp_size=2),
        "takes num_key_value_heads from the model's config, and a LlamaConfig has no such setting",
        "name the layer's own attribute in key_value_heads",
    )
    table = Table(
        stage=StagePlan(layers="0", entry=()),
        regions=("0",),
        column=("0.0",),
        row=("0.1",),
        divisible=("num_heads",),
    )
    policy = TablePolicy(table)
    policy.set_model(
        nn.Sequential(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))]))
    )
    require_one(
        policy.faults(tp_size=2), "takes num_heads from the model's config, and the model has none: leave it"
    )


def test_a_table_that_contradicts_itself_is_refused_with_all_contradictions() -> None:
    with pytest.raises(ValueError) as caught:
        Table(
            stage=StagePlan(layers="layers", entry=("embed",)),
            regions=("mlp", "f", "down"),
            column=("mlp.up", "attn.qkv", "f"),
            row=("mlp.down", "down"),
            second_input={"cross": "states"},
            by_head={"g": {"bias": 0}},
            optional=("mlp", "mlp.side"),
            fused={"attn.q": 3},
            key_value=("mlp.k",),
            split={"attn.bias": 1},
            gathered=("mlp.gate",),
            dropout={"attn": RegionDropout(probability="attn.p", row="attn.out")},
            embedding="embed",
        )
    assert str(caught.value).split("\n") == [
        "column 'attn.qkv' lies in none of the regions ['mlp', 'f', 'down']: its input's gradient would be a part on "
        "each rank",
        "split 'attn.bias' lies in none of the regions ['mlp', 'f', 'down']: its input's gradient would be a part on "
        "each rank",
        "gathered 'mlp.gate' lies in the region 'mlp', whose activations are split",
        "region 'down' is in row: such a layer ends a region, and its input is split already",
        "fused 'attn.q' is not in column and split ['mlp.up', 'attn.qkv', 'f', 'attn.bias']",
        "key_value 'mlp.k' is not in column, split and norms ['mlp.up', 'attn.qkv', 'f', 'attn.bias']",
        "second_input 'cross' is not in regions ['mlp', 'f', 'down']",
        "by_head 'g' is not in regions ['mlp', 'f', 'down']",
        "dropout 'attn' is not in regions ['mlp', 'f', 'down']",
        "row of dropout 'attn.out' is not in row ['mlp.down', 'down']",
        "optional 'mlp.side' is no module or parameter that the table names, and none of those lies below it",
    ]


def test_a_registered_table_is_found_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_TABLES", dict(table_module._TABLES))
    register(LLAMA, "my_llama", "other_llama")
    assert table_for("my_llama") is LLAMA
    assert {"my_llama", "other_llama"} <= set(model_types())
    model = on_meta("LlamaForCausalLM")
    model.config.model_type = "my_llama"
    assert faults(model, tp_size=2, num_stages=2) == []
    assert table_for("unheard_of") is None
