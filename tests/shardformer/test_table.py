"""Tables: contradictory fields, and the registry."""

from dataclasses import replace

import pytest

from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import RegionDropout, Table, model_types, register, table_for
from echelon.shardformer.tables import table as table_module
from echelon.shardformer.tables.decoders import LLAMA
from echelon.shardformer.tables.encoders import ALBERT
from echelon.shardformer.tables.vision import BEIT, SWIN

from .test_refusals import errors, on_meta


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
    assert sorted(caught.value.args) == sorted(
        [
            *(
                f"{name} lies in none of the regions ['mlp', 'f', 'down']: list its module as a region, or "
                "the gradient of its input would be incomplete"
                for name in ("column 'attn.qkv'", "split 'attn.bias'")
            ),
            "gathered 'mlp.gate' lies in the region 'mlp', whose activations are sharded: "
            "only layers outside of regions may be gathered",
            "region 'down' is also in row, but a row-parallel layer ends a region: remove it from one of them",
            "fused 'attn.q' is not in column and split ['mlp.up', 'attn.qkv', 'f', 'attn.bias']",
            "key_value 'mlp.k' is not in column, split and norms ['mlp.up', 'attn.qkv', 'f', 'attn.bias']",
            "second_input 'cross' is not in regions ['mlp', 'f', 'down']",
            "by_head 'g' is not in regions ['mlp', 'f', 'down']",
            "dropout 'attn' is not in regions ['mlp', 'f', 'down']",
            "row of dropout 'attn.out' is not in row ['mlp.down', 'down']",
            "optional 'mlp.side' is not the path of a module or parameter that the table names, nor a parent of one",
        ]
    )


def test_a_registered_table_is_found_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_TABLES", dict(table_module._TABLES))
    register(LLAMA, "my_llama", "other_llama")
    assert table_for("my_llama") is LLAMA
    assert {"my_llama", "other_llama"} <= set(model_types())
    model = on_meta("LlamaForCausalLM")
    model.config.model_type = "my_llama"
    assert errors(model, tp_size=2, num_stages=2) == []
    assert table_for("unheard_of") is None


def test_contradictory_fields_of_a_table_are_refused() -> None:
    bias = "attention.relative_position_bias.relative_position_bias_table"
    with pytest.raises(
        ValueError, match=r"biases .* lies in the region 'attention', whose activations are sharded"
    ):
        replace(SWIN, split={}, biases={bias: 1})
    with pytest.raises(ValueError, match="lies in none of the regions"):
        replace(BEIT, split=BEIT.biases, biases={})
    with pytest.raises(ValueError, match=r"layer of joined .* is not in column"):
        replace(ALBERT, joined={"albert_layers.0.attention": ("albert_layers.0.attention.dense",)})
