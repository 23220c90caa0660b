"""BERT, with all of its heads."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

BERT = Table(
    stage=StagePlan(layers="encoder.layer", entry=("embeddings",)),
    regions=("attention.self", "intermediate"),
    column=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    row=("attention.output.dense", "output.dense"),
    dropout={
        "attention.self": RegionDropout(probability="attention.self.dropout.p", row="attention.output.dense")
    },
    embedding="embeddings.word_embeddings",
    heads=("cls.predictions.decoder",),
)
