"""BERT and its family (RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE), with all of their heads."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

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
