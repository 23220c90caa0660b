"""Refusals of models and tables: all reasons at once, on models without memory, without processes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from echelon.pipeline.plan import StagePlan
from echelon.shardformer import (
    Policy,
    Table,
    policy_for,
)
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.decoders import GPT2, LLAMA
from echelon.shardformer.tables.encoder_decoders import T5
from echelon.shardformer.tables.encoders import ALBERT
from echelon.verify.models import ModelChoice

from . import compare

# A table that does not say what padded heads could be added to.
UNPADDED = replace(LLAMA, attention={})


def on_meta(class_name: str, **settings: Any) -> Any:
    model_class = getattr(transformers, class_name)
    base = compare.BASES.get(model_class.config_class.model_type, compare.TINY)
    with torch.device("meta"):
        return model_class(model_class.config_class(**{**base, **settings}))


def llama(**settings: Any) -> Any:
    return on_meta("LlamaForCausalLM", **settings)


def errors(model: nn.Module, policy: Policy | None = None, **sizes: Any) -> list[str]:
    return split_errors(model, policy or policy_for(model), **sizes)


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
        *((family + head, {}) for family in ("T5", "MT5", "UMT5") for head in ("Model", "EncoderModel")),
    ],
)
def test_what_works_is_not_refused(class_name: str, settings: dict[str, Any]) -> None:
    model = on_meta(class_name, **settings)
    for tp_size in (1, 2, 3, 4) if class_name.endswith("Model") else (1, 2, 4):
        for num_stages in (1, 2):
            assert errors(model, tp_size=tp_size, num_stages=num_stages) == []


# Swin's heads are 4, 4 and 8.
@pytest.mark.parametrize(
    "model_type", ["vit", "deit", "roberta", "electra", "albert", "beit", "swin", "swinv2", "t5", "bart"]
)
def test_heads_are_added_where_the_ranks_do_not_divide_them(model_type: str) -> None:
    assert errors(ModelChoice(model_type=model_type).build_on_meta(), tp_size=8) == []


def without_output() -> Any:
    model = on_meta("T5Model")
    del model.decoder.block[1].layer[1].EncDecAttention.o
    return model


def without_bias() -> Any:
    model = on_meta("T5Model")
    del model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return model


def with_another_name() -> Any:
    model = on_meta("T5Model")
    feed_forward = model.encoder.block[1].layer[1].DenseReluDense
    feed_forward.wi_2 = feed_forward.wi
    del feed_forward.wi
    return model


def with_shared_bias() -> Any:
    model = on_meta("T5Model")
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    model.second_bias = nn.Embedding(*bias.weight.shape, device="meta")
    model.second_bias.weight = bias.weight
    return model


def with_second_head() -> Any:
    model = llama(tie_word_embeddings=False)
    model.second_head = nn.Linear(32, compare.VOCABULARY, bias=False, device="meta")
    model.second_head.weight = model.lm_head.weight
    return model


class Adapted(nn.Linear):
    """A projection with a low-rank term of its own."""

    def __init__(self, native: nn.Linear) -> None:
        super().__init__(native.in_features, native.out_features, native.bias is not None, device="meta")
        self.down = nn.Linear(native.in_features, 2, bias=False, device="meta")


def with_adapters() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    model.lm_head = Adapted(model.lm_head)
    return model


def with_gate() -> Any:
    model = llama()
    model.model.layers[1].self_attn.gate = nn.Linear(32, 1, bias=False, device="meta")
    return model


def with_hook() -> Any:
    model = llama()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output)
    return model


def with_integers() -> Any:
    model = llama()
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    return model


class Special(nn.Parameter):
    """A tensor that does something of its own."""


def with_special_tensor() -> Any:
    model = llama()
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = Special(torch.empty(projection.weight.shape))
    return model


def with_maximal_norm() -> Any:
    model = llama(tie_word_embeddings=False)
    model.set_input_embeddings(nn.Embedding(compare.VOCABULARY, 32, max_norm=1.0, device="meta"))
    return model


def with_another_layer() -> Any:
    model = llama()
    model.model.layers[1] = type("Other", (type(model.model.layers[1]),), {})(model.config, 1).to("meta")
    return model


class FusedLoss(transformers.LlamaForCausalLM):
    """Computes its loss from the head's weight, as fused losses do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), labels.flatten())


def with_fused_loss() -> Any:
    with torch.device("meta"):
        return FusedLoss(transformers.LlamaConfig(**compare.TINY))


def returning(setting: str) -> Any:
    model = llama(attn_implementation="eager")
    setattr(model.config, setting, True)
    return model


def without_setting(name: str) -> Any:
    model = llama()
    setattr(model.config, name, None)
    return model


def without_config() -> nn.Module:
    class Stack(nn.Sequential):
        pass

    return Stack(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))]))


BARE = Table(
    stage=StagePlan(layers="0", entry=()),
    regions=("0",),
    column=("0.0",),
    row=("0.1",),
    divisible=("num_heads",),
)
GROUPED = dict(hidden_size=48, num_attention_heads=12, num_key_value_heads=3, intermediate_size=48)
ONE_DECODER_LAYER = {"num_decoder_layers": 1}


class Row(NamedTuple):
    """A model, the sizes that it is refused for, and for each error the words that it holds.

    Args:
        table: None is that of the model.
    """

    model: Callable[[], nn.Module]
    sizes: dict[str, Any]
    needles: tuple[tuple[str, ...], ...]
    table: Table | None = None


TWO = {"tp_size": 2}
ROWS = {
    "a module is missing": Row(
        without_output, TWO, (("decoder.block.1", "'layer.1.EncDecAttention.o'", "no such module"),)
    ),
    "a parameter is missing": Row(without_bias, TWO, (("encoder.block.0", "no such module or parameter"),)),
    "an unnamed module": Row(with_another_name, TWO, (("encoder.block.1", "wi_2.weight works on split"),)),
    "another second input": Row(
        lambda: on_meta("UMT5Model", **ONE_DECODER_LAYER),
        TWO,
        (("decoder.block.0.layer.1.EncDecAttention", "'key_value_states'", "'encoder_hidden_states'"),),
        T5,  # umT5 names it otherwise
    ),
    "a shared bias": Row(with_shared_bias, TWO, (("second_bias: shares a weight with encoder.block.0",),)),
    "a second head": Row(with_second_head, TWO, (("second_head: shares a weight with lm_head",),)),
    "heads": Row(
        lambda: llama(num_attention_heads=8, intermediate_size=48),
        {"tp_size": 3},
        (
            ("num_attention_heads=8 is not divisible by tp_size=3: use one of tp_size=[1, 2, 4, 8]",),
            ("num_key_value_heads=8",),
            ("self_attn.q_proj (and 1 more like it): 32 entries along dim 0",),
            ("self_attn.o_proj (and 1 more like it): 32 entries along dim 1",),
        ),
        UNPADDED,
    ),
    "key-value heads": Row(
        lambda: llama(**GROUPED),
        TWO,
        (("num_key_value_heads=3 neither divides tp_size=2", "tp_size=[1, 3, 6, 12]"),),
        UNPADDED,
    ),
    "heads of a part": Row(
        lambda: ModelChoice(model_type="sam").build_on_meta(),
        {"tp_size": 8},
        (
            (
                "mask_decoder",
                "num_attention_heads=4 is not divisible by tp_size=8: use one of tp_size=[1, 2, 4]",
            ),
        ),
    ),
    "a width": Row(
        lambda: on_meta("GPT2LMHeadModel", n_inner=49),
        TWO,
        (
            ("transformer.h.0.mlp.c_fc (and 1 more like it): 49 entries", "one of [1, 7, 49]"),
            ("transformer.h.0.mlp.c_proj (and 1 more like it): 49 entries",),
        ),
    ),
    "too few layers": Row(
        llama, {"num_stages": 4}, (("2 layers and the pipeline 4 stages", "at most 2 stages"),)
    ),
    "layers of stages": Row(
        llama,
        {"num_stages": 2, "num_layers_per_stage": [2, 0]},
        (("num_layers_per_stage=[2, 0]", "[1, 1] would"),),
    ),
    "too few runs of one layer": Row(
        lambda: ModelChoice(model_type="albert", num_layers=4).build_on_meta(),
        {"num_stages": 5},
        (("4 layers and the pipeline 5 stages",),),
    ),
    "all hidden states": Row(
        lambda: returning("output_hidden_states"),
        {"num_stages": 2},
        (("output_hidden_states=True in the model's config", "use pp_size=1"),),
    ),
    "all attentions": Row(
        lambda: returning("output_attentions"),
        {"num_stages": 2},
        (("output_attentions=True in the model's config", "use pp_size=1"),),
    ),
    "attentions of all heads": Row(
        lambda: returning("output_attentions"),
        TWO,
        (("output_attentions=True in the model's config", "its own heads alone"),),
    ),
    "adapters of one's own": Row(
        with_adapters,
        TWO,
        (("lm_head (and 2 more like it): ", "Adapted and not a plain"),),
    ),
    "whole among split": Row(
        with_gate, TWO, (("model.layers.1: self_attn.gate.weight works", "name its module in column, row"),)
    ),
    "norms by head": Row(  # the table of llama is not that of qwen3
        lambda: on_meta("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8),
        TWO,
        (
            ("model.layers.0 (and 1 more like it): self_attn.q_norm.weight works on split activations",),
            ("self_attn.k_norm",),
        ),
        LLAMA,
    ),
    "a norm that is not named": Row(
        lambda: ModelChoice(model_type="albert").build_on_meta(),
        TWO,
        (
            ("LayerNorm.weight works on split activations in the region 'albert_layers.0.attention'",),
            ("LayerNorm.bias works on split activations",),
        ),
        replace(ALBERT, whole=()),
    ),
    "a hook": Row(with_hook, TWO, (("model.embed_tokens: ", "has hooks", "after the model is split"),)),
    "integers": Row(
        with_integers, TWO, (("model.layers.0.mlp.up_proj: ", "a weight of Parameter in torch.int8"),)
    ),
    "a special tensor": Row(with_special_tensor, TWO, (("mlp.up_proj: ", "a weight of Special in torch."),)),
    "a maximal norm": Row(with_maximal_norm, TWO, (("model.embed_tokens: ", "has max_norm"),)),
    "layers of two classes": Row(
        with_another_layer, TWO, (("model.layers: the layers are of several classes",),)
    ),
    "a fused loss": Row(with_fused_loss, TWO, (("the forward of this FusedLoss reads a weight itself",),)),
    "a table of another model": Row(
        llama,
        TWO,
        (
            ("the stage plan names 'model.h', and this LlamaForCausalLM has no",),
            *(("the stage plan names",),) * 3,
        ),
        GPT2,
    ),
    "a name that matches nothing": Row(
        llama,
        TWO,
        (("model.layers.0 (and 1 more like it): ", "'mlp.side_proj' in a layer, which has no such"),),
        replace(LLAMA, column=(*LLAMA.column, "mlp.side_proj")),
    ),
    "an embedding that is not there": Row(
        llama, TWO, (("names 'model.embed', and the model has no such",),), replace(LLAMA, embedding="embed")
    ),
    "an attribute that is not there": Row(
        llama,
        TWO,
        (("model.layers.0 (and 1 more like it): the table names 'self_attn.heads'", "no attribute of"),),
        replace(LLAMA, divide=("self_attn.heads",)),
    ),
    "a setting that the split needs": Row(
        llama,
        TWO,
        (("hidden_act='silu' in the model's config does not go", "use hidden_act='gelu' or tp_size=1"),),
        replace(LLAMA, needed={"hidden_act": "gelu"}),
    ),
    "a setting that is not there": Row(
        lambda: without_setting("num_key_value_heads"),
        TWO,
        (
            (
                "takes num_key_value_heads from the model's config, and a LlamaConfig has no such setting",
                "name the layer's own attribute in key_value_heads",
            ),
        ),
        LLAMA,
    ),
    "no config": Row(
        without_config,
        TWO,
        (("takes num_heads from the model's config, and the model has none: leave it",),),
        BARE,
    ),
    "all at once": Row(
        lambda: llama(num_attention_heads=4, num_key_value_heads=2, intermediate_size=50),
        {"tp_size": 3, "num_stages": 3},
        (
            ("2 layers and the pipeline 3 stages",),
            ("num_attention_heads=4",),
            ("num_key_value_heads=2",),
            ("mlp.gate_proj (and 3 more like it): 50 entries along dim 0",),
            ("mlp.down_proj (and 1 more like it): 50 entries along dim 1",),
            ("self_attn.q_proj (and 1 more like it): 32 entries",),
            ("self_attn.o_proj (and 1 more like it): 32 entries",),
        ),
        UNPADDED,
    ),
}


def departure(row: Row) -> str | None:
    """Return what a row's errors have too much or lack; None where they are those that it says."""
    model = row.model()
    found = errors(model, None if row.table is None else TablePolicy(row.table), **row.sizes)
    unexpected = [error for error in found if not any(all(n in error for n in each) for each in row.needles)]
    missing = [each for each in row.needles if not any(all(n in error for n in each) for error in found)]
    return f"unexpected {unexpected}, missing {missing} in {found}" if unexpected or missing else None


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_cannot_be_split_is_refused_for_this_and_nothing_else(row: Row) -> None:
    assert departure(row) is None


def test_what_only_tensor_ranks_refuse_is_cut_into_stages() -> None:
    assert errors(with_adapters(), num_stages=2) == []
    assert errors(llama(**GROUPED), TablePolicy(UNPADDED), tp_size=6) == []


def test_layers_of_several_widths_are_split_each_by_its_own() -> None:
    model = on_meta("GPT2LMHeadModel")
    model.transformer.h[1] = on_meta("GPT2LMHeadModel", n_inner=64).transformer.h[1]
    assert errors(model, tp_size=2) == []


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
