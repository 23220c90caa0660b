"""Vision transformers of one width: ViT, DeiT, and BEiT with its relative position biases."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

_STAGE = StagePlan(layers="layers", entry=("embeddings",))

# The names of releases before 5.9.
_OLDER_STAGE = StagePlan(layers="encoder.layer", entry=("embeddings",))
_ATTENTION = "attention.attention"
_OLDER = Table(
    stage=_OLDER_STAGE,
    regions=(_ATTENTION, "intermediate"),
    column=(*(f"{_ATTENTION}.{name}" for name in ("query", "key", "value")), "intermediate.dense"),
    row=("attention.output.dense", "output.dense"),
    attention={_ATTENTION: "attention.output.dense"},
    divide=(f"{_ATTENTION}.num_attention_heads", f"{_ATTENTION}.all_head_size"),
    dropout={
        _ATTENTION: RegionDropout(probability=f"{_ATTENTION}.dropout_prob", row="attention.output.dense")
    },
)

VIT = Table(
    stage=_STAGE,
    regions=("attention", "mlp"),
    column=("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
    row=("attention.o_proj", "mlp.fc2"),
    attention={"attention": "attention.o_proj"},
    dropout={"attention": RegionDropout(probability="attention.attention_dropout", row="attention.o_proj")},
    older={_OLDER_STAGE.layers: _OLDER},
)

_BIAS = f"{_ATTENTION}.relative_position_bias"
_SHARED = "encoder.relative_position_bias"
_OLDER_BEIT = replace(
    _OLDER,
    stage=replace(
        _OLDER_STAGE,
        everywhere=(_SHARED,),
        are_entries_reckoned=True,
        arity=1,
        collecting=("out_features", "fpn1"),
    ),
    optional=(_BIAS,),
    split={f"{_BIAS}.relative_position_bias_table": 1},
    shared_biases={f"{_SHARED}.relative_position_bias_table": 1},
    dropout={_ATTENTION: RegionDropout(probability=f"{_ATTENTION}.dropout.p", row="attention.output.dense")},
)

# The biases of a layer, or of all layers in one.
BEIT = replace(
    VIT,
    stage=replace(
        _STAGE,
        everywhere=("shared_position_bias",),
        collecting=("out_features", "fpn"),  # backbones and semantic segmentation
    ),
    optional=("relative_position_bias",),
    biases={"relative_position_bias.relative_position_bias_table": 1},
    shared_biases={"shared_position_bias.relative_position_bias_table": 1},
    older={_OLDER_STAGE.layers: _OLDER_BEIT},
)
