"""GPT-NeoX: one projection for query, key and value, which lie side by side for each head."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

GPT_NEOX = Table(
    stage=StagePlan(layers="layers", entry=("embed_in",)),
    regions=("attention", "mlp"),
    # Cut between heads, each with its query, key and value.
    column=("attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("attention.dense", "mlp.dense_4h_to_h"),
    attention={"attention": "attention.dense"},
    dropout={"attention": RegionDropout(probability="attention.attention_dropout", row="attention.dense")},
    embedding="embed_in",
    heads=("embed_out", "lm_head"),
)
