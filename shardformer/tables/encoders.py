"""Tables of text encoders: BERT and its family, ALBERT."""

from ...pipeline.stage_plan import StagePlan
from .table import RegionDropout, Table

# BERT and its family (RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE), with all of their heads.
BERT = Table(
    stage=StagePlan(
        layers="encoder.layer",
        entry=("embeddings", "embeddings_project"),
        optional=("embeddings_project",),  # in ELECTRA, where embeddings are narrower than layers
    ),
    regions=("attention.self", "intermediate"),
    column=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    row=("attention.output.dense", "output.dense"),
    attention={"attention.self": "attention.output.dense"},
    dropout={
        "attention.self": RegionDropout(probability="attention.self.dropout.p", row="attention.output.dense")
    },
    embedding="embeddings.word_embeddings",
    heads=("cls.predictions.decoder", "lm_head.decoder", "generator_lm_head"),
)

# ALBERT: one group of layers, mostly a single layer, runs many times.
# The layers of a group; published models have one.
_ALBERT_LAYERS = tuple(f"albert_layers.{index}" for index in range(4))
_ALBERT_INPUTS = {
    f"{layer}.attention": tuple(f"{layer}.attention.{name}" for name in ("query", "key", "value"))
    for layer in _ALBERT_LAYERS
}
_ALBERT_WIDENING = tuple(f"{layer}.ffn" for layer in _ALBERT_LAYERS)

ALBERT = Table(
    stage=StagePlan(
        layers="encoder.albert_layer_groups",
        entry=("embeddings", "encoder.embedding_hidden_mapping_in"),
        applied="num_hidden_layers",
    ),
    regions=(*_ALBERT_INPUTS, *_ALBERT_WIDENING),
    joined=_ALBERT_INPUTS,
    whole=tuple(f"{region}.LayerNorm" for region in _ALBERT_INPUTS),
    column=(*(name for names in _ALBERT_INPUTS.values() for name in names), *_ALBERT_WIDENING),
    row=(
        *(f"{region}.dense" for region in _ALBERT_INPUTS),
        *(f"{layer}.ffn_output" for layer in _ALBERT_LAYERS),
    ),
    attention={region: f"{region}.dense" for region in _ALBERT_INPUTS},
    optional=_ALBERT_LAYERS[1:],
    dropout={
        region: RegionDropout(probability=f"{region}.attention_dropout.p", row=f"{region}.dense")
        for region in _ALBERT_INPUTS
    },
    embedding="embeddings.word_embeddings",
    heads=("predictions.decoder",),
)

# The table of each model type.
TABLES = {
    "albert": ALBERT,
    "bert": BERT,
    "camembert": BERT,
    "electra": BERT,
    "ernie": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
}
