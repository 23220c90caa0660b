"""ALBERT: one group of layers, mostly of one layer, runs many times."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

# The layers of a group; published models have one.
_LAYERS = tuple(f"albert_layers.{index}" for index in range(4))
_INPUTS = {
    f"{layer}.attention": tuple(f"{layer}.attention.{name}" for name in ("query", "key", "value"))
    for layer in _LAYERS
}
_WIDENING = tuple(f"{layer}.ffn" for layer in _LAYERS)

ALBERT = Table(
    stage=StagePlan(
        layers="encoder.albert_layer_groups",
        entry=("embeddings", "encoder.embedding_hidden_mapping_in"),
        applied="num_hidden_layers",
    ),
    regions=(*_INPUTS, *_WIDENING),
    joined=_INPUTS,
    whole=tuple(f"{region}.LayerNorm" for region in _INPUTS),
    column=(*(name for names in _INPUTS.values() for name in names), *_WIDENING),
    row=(*(f"{region}.dense" for region in _INPUTS), *(f"{layer}.ffn_output" for layer in _LAYERS)),
    attention={region: f"{region}.dense" for region in _INPUTS},
    optional=_LAYERS[1:],
    dropout={
        region: RegionDropout(probability=f"{region}.attention_dropout.p", row=f"{region}.dense")
        for region in _INPUTS
    },
    embedding="embeddings.word_embeddings",
    heads=("predictions.decoder",),
)
