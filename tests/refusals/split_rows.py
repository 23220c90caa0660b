"""Refusals of models and tables: all reasons at once, for models on the meta device, without processes."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import Policy, Table, policy_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.decoders import GPT2, LLAMA
from echelon.shardformer.tables.encoder_decoders import T5
from echelon.verify.model_choice import ModelChoice

from . import compare

# A table without `attention`, so that heads cannot be padded.
UNPADDED = replace(LLAMA, attention={})
BARE = Table(
    stage=StagePlan(layers="0", entry=()),
    regions=("0",),
    column=("0.0",),
    row=("0.1",),
    divisible=("num_heads",),
)
TWO = {"tp_size": 2}
GROUPED = dict(hidden_size=48, num_attention_heads=12, num_key_value_heads=3, intermediate_size=48)


def on_meta(class_name: str, **settings: Any) -> Any:
    model_class = getattr(transformers, class_name)
    base = compare.BASES.get(model_class.config_class.model_type, compare.TINY)
    with torch.device("meta"):
        return model_class(model_class.config_class(**{**base, **settings}))


def llama(**settings: Any) -> Any:
    return on_meta("LlamaForCausalLM", **settings)


def errors(model: nn.Module, policy: Policy | None = None, **sizes: Any) -> list[str]:
    return split_errors(model, policy or policy_for(model), **sizes)


def changed(change: Callable[[Any], object], **settings: Any) -> Callable[[], Any]:
    """Build a llama and change it by a function."""

    def build() -> Any:
        with torch.device("meta"):
            model = llama(**settings)
            change(model)
        return model

    return build


def with_second_head(model: Any) -> None:
    model.second_head = nn.Linear(32, compare.VOCABULARY, bias=False)
    model.second_head.weight = model.lm_head.weight


class Adapted(nn.Linear):
    """A projection with an additional low-rank term."""


def with_adapters(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(32, 48)
    model.lm_head = Adapted(32, compare.VOCABULARY)


def with_gate(model: Any) -> None:
    model.model.layers[1].self_attn.gate = nn.Linear(32, 1, bias=False)


class Special(nn.Parameter):
    """A tensor subclass, for example a quantized one."""


def with_special_tensor(model: Any) -> None:
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = Special(torch.empty(projection.weight.shape))


def with_another_layer(model: Any) -> None:
    layers = model.model.layers
    layers[1] = type("Other", (type(layers[1]),), {})(model.config, 1)


class FusedLoss(transformers.LlamaForCausalLM):
    """A model that computes its loss from the head's weight, like fused losses."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), labels.flatten())


def fused_loss(model: Any) -> None:
    model.__class__ = FusedLoss


def returning(setting: str) -> Callable[[], Any]:
    return changed(lambda model: setattr(model.config, setting, True), attn_implementation="eager")


def without_config() -> nn.Module:
    class Stack(nn.Sequential):
        pass

    return Stack(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))]))


def without_output() -> Any:
    model = on_meta("T5Model")
    del model.decoder.block[1].layer[1].EncDecAttention.o
    return model


class Row(NamedTuple):
    """A model, the sizes for which it is refused, and needles of each expected error.

    Args:
        table: None takes the table of the model.
    """

    model: Callable[[], nn.Module]
    sizes: dict[str, Any]
    needles: tuple[tuple[str, ...], ...]
    table: Table | None = None


ROWS = {
    "a module is missing": Row(
        without_output, TWO, (("decoder.block.1", "'layer.1.EncDecAttention.o'", "no such module"),)
    ),
    "another second input": Row(
        lambda: on_meta("UMT5Model", num_decoder_layers=1),
        TWO,
        (("decoder.block.0.layer.1.EncDecAttention", "'key_value_states'", "'encoder_hidden_states'"),),
        T5,  # umT5 names it otherwise
    ),
    "a second head": Row(
        changed(with_second_head, tie_word_embeddings=False),
        TWO,
        (("second_head: shares a parameter with lm_head",),),
    ),
    "key-value heads": Row(
        lambda: llama(**GROUPED),
        TWO,
        (
            (
                "num_key_value_heads=3 is neither a divisor nor a multiple of tp_size=2",
                "tp_size=[1, 3, 6, 12]",
            ),
        ),
        UNPADDED,
    ),
    "heads of a part": Row(
        lambda: ModelChoice(model_type="sam").build_on_meta(),
        {"tp_size": 8},
        (("mask_decoder", "num_attention_heads=4 is not divisible by tp_size=8: use one of tp_size=[1, 2"),),
    ),
    "a width": Row(
        lambda: on_meta("GPT2LMHeadModel", n_inner=49),
        TWO,
        (
            ("transformer.h.0.mlp.c_fc (and 1 more like it): 49 entries", "one of [1, 7, 49]"),
            ("transformer.h.0.mlp.c_proj (and 1 more like it): 49 entries",),
        ),
    ),
    "layers of stages": Row(
        llama,
        {"num_stages": 2, "num_layers_per_stage": [2, 0]},
        (("num_layers_per_stage=[2, 0]", "use [1, 1], for example"),),
    ),
    "too few runs of one layer": Row(
        lambda: ModelChoice(model_type="albert", num_layers=4).build_on_meta(),
        {"num_stages": 5},
        (("4 layers and the pipeline 5 stages",),),
    ),
    "all hidden states": Row(
        returning("output_hidden_states"),
        {"num_stages": 2},
        (("output_hidden_states=True in the model's config", "use pp_size=1"),),
    ),
    "attentions of all heads": Row(
        returning("output_attentions"),
        TWO,
        (("output_attentions=True in the model's config", "only the local heads' attention"),),
    ),
    "adapters of one's own": Row(
        changed(with_adapters), TWO, (("lm_head (and 2 more like it): ", "Adapted, not a plain"),)
    ),
    "whole among split": Row(
        changed(with_gate),
        TWO,
        (("model.layers.1.self_attn.gate.weight: computes on sharded", "the axis 'tp'", "in column, row"),),
    ),
    "norms by head": Row(  # the table of llama is not that of qwen3
        lambda: on_meta("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8),
        TWO,
        (("model.layers.0.self_attn.q_norm.weight (and 3 more like it): computes on sharded activations",),),
        LLAMA,
    ),
    "a hook": Row(
        changed(lambda model: model.get_input_embeddings().register_forward_hook(print)),
        TWO,
        (("model.embed_tokens: ", "has hooks", "after the model is sharded"),),
    ),
    "a special tensor": Row(
        changed(with_special_tensor), TWO, (("mlp.up_proj: ", "a weight of Special in torch."),)
    ),
    "layers of two classes": Row(
        changed(with_another_layer), TWO, (("model.layers: the layers are of several classes",),)
    ),
    "a fused loss": Row(
        changed(fused_loss), TWO, (("the forward of this FusedLoss reads a weight itself",),)
    ),
    "a table of another model": Row(
        llama,
        TWO,
        (("the stage plan names 'model.h', and this Llama",), *(("the stage plan names",),) * 3),
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
        (("hidden_act='silu' in the model's config is not supported", "use hidden_act='gelu' or tp_size=1"),),
        replace(LLAMA, needed={"hidden_act": "gelu"}),
    ),
    "a setting that is not there": Row(
        changed(lambda model: setattr(model.config, "num_key_value_heads", None)),
        TWO,
        (("takes num_key_value_heads from the model's config, and a LlamaConfig has no", "key_value_heads"),),
        LLAMA,
    ),
    "no config": Row(
        without_config,
        TWO,
        (("takes num_heads from the model's config, and the model has none: name in divide those",),),
        BARE,
    ),
    "all at once": Row(
        lambda: llama(num_attention_heads=4, num_key_value_heads=2, intermediate_size=50),
        {"tp_size": 3, "num_stages": 3},
        (
            ("2 layers and the pipeline 3 stages", "at most 2 stages"),
            ("num_attention_heads=4 is not divisible by tp_size=3: use one of tp_size=[1, 2, 4]",),
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
    """Return the unexpected and missing errors of a row; None if they are as expected."""
    model = row.model()
    found = errors(model, None if row.table is None else TablePolicy(row.table), **row.sizes)
    unexpected = [error for error in found if not any(all(n in error for n in each) for each in row.needles)]
    missing = [each for each in row.needles if not any(all(n in error for n in each) for error in found)]
    return f"unexpected {unexpected}, missing {missing} in {found}" if unexpected or missing else None


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_models_that_cannot_be_sharded_have_exactly_these_errors(row: Row) -> None:
    assert departure(row) is None


def test_a_model_that_only_tensor_ranks_refuse_is_cut_into_stages() -> None:
    assert errors(changed(with_adapters)(), num_stages=2) == []
    assert errors(llama(**GROUPED), TablePolicy(UNPADDED), tp_size=6) == []


def test_layers_of_several_widths_are_split_each_by_its_own() -> None:
    model = on_meta("GPT2LMHeadModel")
    model.transformer.h[1] = on_meta("GPT2LMHeadModel", n_inner=64).transformer.h[1]
    assert errors(model, tp_size=2) == []


@pytest.mark.parametrize(
    ("sequences_alone", "words"),
    [
        (False, "and model_type=None has no table: leave tp_size and pp_size at 1"),
        (True, "and model_type=None has no table: leave enable_sequence_parallelism and sp_size out"),
    ],
)
def test_a_model_without_a_table_is_refused_with_what_to_do(sequences_alone: bool, words: str) -> None:
    with pytest.raises(ValueError, match=r"register a Table of its layers \(docs/pol") as refused:
        policy_for(nn.Linear(2, 2), sequences_alone=sequences_alone)
    assert words in str(refused.value)
    assert "the config of a Linear has no base_model_tp_plan or" in str(refused.value)


def test_a_model_with_plans_for_two_lists_of_layers_is_refused_with_their_names() -> None:
    model = nn.ModuleDict({name: nn.ModuleList([nn.Linear(2, 2)]) for name in ("encoder", "decoder")})
    model.config = SimpleNamespace(  # type: ignore[assignment]
        model_type="two_lists", base_model_tp_plan={"encoder.*": "colwise", "decoder.*": "colwise"}
    )
    with pytest.raises(
        ValueError, match=r"plans for \['encoder', 'decoder'\].*'two_lists' has no table: leave enable"
    ):
        policy_for(model, sequences_alone=True)
