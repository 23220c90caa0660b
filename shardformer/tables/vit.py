"""Vision transformers of one width: ViT, DeiT, and BEiT with its relative position biases."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

_STAGE = StagePlan(layers="layers", entry=("embeddings",))

VIT = Table(
    stage=_STAGE,
    regions=("attention", "mlp"),
    column=("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
    row=("attention.o_proj", "mlp.fc2"),
    attention={"attention": "attention.o_proj"},
    dropout={"attention": RegionDropout(probability="attention.attention_dropout", row="attention.o_proj")},
)

# The biases of a layer, or of all layers in one.
BEIT = replace(
    VIT,
    attention={},
    stage=replace(
        _STAGE,
        everywhere=("shared_position_bias",),
        collecting=("out_features", "fpn"),  # backbones and semantic segmentation
    ),
    optional=("relative_position_bias",),
    biases={"relative_position_bias.relative_position_bias_table": 1},
    shared_biases={"shared_position_bias.relative_position_bias_table": 1},
)
