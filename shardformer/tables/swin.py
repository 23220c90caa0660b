"""Swin and SwinV2: four lists of blocks, each after the first behind a layer that halves height and width."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table
from .vit import VIT

_STAGE = StagePlan(
    layers="encoder.layers.*.blocks",
    between="downsample",
    entry=("embeddings",),
    are_entries_reckoned=True,
    arity=2,
    collecting=("out_features",),
)

# Its biases are computed by a small perceptron, whose last layer has an output per head.
_BIASES = "attention.self.continuous_position_bias_mlp"

SWINV2 = Table(
    stage=replace(_STAGE, arity=1),
    regions=("attention.self", "intermediate"),
    column=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    row=("attention.output.dense", "output.dense"),
    attention={"attention.self": "attention.output.dense"},
    query_heads="attention.self.num_attention_heads",
    divide=("attention.self.num_attention_heads", "attention.self.all_head_size"),
    split={"attention.self.logit_scale": 0, f"{_BIASES}.2.weight": 0},
    partial=(f"{_BIASES}.0",),
    dropout={
        "attention.self": RegionDropout(probability="attention.self.dropout.p", row="attention.output.dense")
    },
)

SWIN = replace(
    VIT,
    stage=_STAGE,
    query_heads="attention.num_attention_heads",
    split={"attention.relative_position_bias.relative_position_bias_table": 1},
    # The names of releases before 5.9.
    older={
        "encoder.layers.0.blocks.0.intermediate": replace(
            SWINV2, split={"attention.self.relative_position_bias_table": 1}, partial=()
        )
    },
)
