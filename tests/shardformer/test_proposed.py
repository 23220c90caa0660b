"""Splits that are proposed from a trace: those of the tables again, and those of types that have none."""

from typing import Any

import pytest
import transformers
from torch import nn
from transformers.models.vit_mae import modeling_vit_mae

from echelon.derive.build import Copy, small_copy
from echelon.derive.double import in_double
from echelon.shardformer.derived import dropouts_of
from echelon.shardformer.derived_policy import DerivedPolicy
from echelon.shardformer.proposed import proposed_table
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.split_trial import split_departure
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.table import RegionDropout, Table, table_for

from ..derive.copies import double_copy_of
from ..slow import slow

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
CROSS = ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj")


def proposed(copy: Copy) -> Table:
    return proposed_table(
        copy, copy.model, lambda table: split_departure(copy, lambda _: TablePolicy(table), 2)
    )


@pytest.mark.parametrize("model_type", ["gpt2", *slow("bert", "llama", "opt")])
def test_the_split_of_a_table_is_proposed(model_type: str) -> None:
    written, table = table_for(model_type), proposed(double_copy_of(model_type))
    assert isinstance(written, Table)
    assert {*table.column} == {*written.column} and {*table.row} == {*written.row}
    assert {*table.divide} >= {*written.divide}


@pytest.mark.parametrize(
    ("model_type", "column", "row"),
    [
        ("biogpt", (*ATTENTION, "fc1"), ("self_attn.out_proj", "fc2")),
        (
            "persimmon",
            ("self_attn.query_key_value", "mlp.dense_h_to_4h"),
            ("self_attn.dense", "mlp.dense_4h_to_h"),
        ),
        # Its experts stay replicated.
        *slow(("gpt_oss", ATTENTION, ("self_attn.o_proj",))),
        # One key-value head is fused to all query heads; transformers 5.0 warns.
        pytest.param(
            *("gpt_bigcode", ("mlp.c_fc",), ("mlp.c_proj",)),
            marks=pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning"),
        ),
        *slow(
            ("m2m_100", (*ATTENTION, *CROSS, "fc1"), ("self_attn.out_proj", "encoder_attn.out_proj", "fc2"))
        ),
        pytest.param(  # its masks are random
            "vit_mae",
            ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
            ("attention.o_proj", "mlp.fc2"),
            marks=pytest.mark.skipif(
                hasattr(modeling_vit_mae, "ViTMAEIntermediate"),
                reason="older releases name its layers otherwise",
            ),
        ),
    ],
)
def test_types_without_a_table_are_split(
    model_type: str, column: tuple[str, ...], row: tuple[str, ...]
) -> None:
    copy = double_copy_of(model_type)
    policy = DerivedPolicy(copy.model)
    assert split_errors(copy.model, policy, tp_size=2) == []
    assert (policy.table.column, policy.table.row) == (column, row)


def test_cross_attention_takes_encoder_states_and_all_embeddings_of_one_weight_are_split() -> None:
    table = proposed(double_copy_of("m2m_100"))
    assert table.second_input == {"encoder_attn": "key_value_states"}
    assert {table.embedding, *table.further_embeddings} == {
        "shared", "encoder.embed_tokens", "decoder.embed_tokens"
    }  # fmt: skip


def test_a_vocabulary_that_departs_stays_replicated() -> None:
    model = double_copy_of("blip").make(0)  # its decoder is a model of its own, with a head
    policy = DerivedPolicy(model)
    assert split_errors(model, policy, tp_size=2) == []
    assert (policy.table.embedding, policy.table.heads) == (None, ())
    assert "crossattention.output.dense" in policy.table.row


@pytest.mark.slow
def test_pairs_that_contradict_each_other_are_tried_alone() -> None:
    model = double_copy_of("hy_v4_vl").make(0)
    policy = DerivedPolicy(model)
    assert split_errors(model, policy, tp_size=2) == [] and policy.table.row


def test_keys_of_fewer_heads_are_those_of_the_full_model() -> None:
    """The small copy may have as many key-value heads as query heads."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 99}
    full = transformers.LlamaForCausalLM(transformers.LlamaConfig(**heads, **sizes))
    copy = double_copy_of("llama", num_attention_heads=8, num_key_value_heads=8)
    table = proposed_table(copy, full, lambda _: None)
    assert table.key_value == ("self_attn.k_proj", "self_attn.v_proj")


class Mixing(transformers.LlamaForCausalLM):
    """A Llama whose MLP mixes the features between its two projections."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.Softmax(-1)


def test_what_mixes_features_stays_replicated() -> None:
    copy = in_double(small_copy(Mixing, transformers.LlamaConfig(), "CAUSAL_LM"))
    assert proposed(copy).row == ("self_attn.o_proj",)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_flag_is_no_probability_of_dropout(is_used: bool) -> None:
    block = nn.ModuleDict({"inner": nn.Dropout(0.1)})
    block.use_dropout = is_used
    assert dropouts_of(block) == ["inner.p"]


@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_any_dropout_of_a_region_needs_other_numbers_on_every_rank(probability: float) -> None:
    layer = nn.ModuleDict({"mlp": nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 4), nn.Dropout(probability))})
    paths = tuple(f"mlp.{name}" for name in dropouts_of(layer["mlp"]))
    assert RegionDropout(probability=paths, row="mlp.1").is_used(layer) is (probability > 0)


def test_a_type_without_such_layers_is_refused_with_the_reason() -> None:
    copy = double_copy_of("mamba")
    (error,) = split_errors(copy.model, DerivedPolicy(copy.model), tp_size=2)
    reason = "no split of a MambaForCausalLM gives the numbers of one process: the layers backbone.layers: "
    assert reason in error
