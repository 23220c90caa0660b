"""BLOOM: one projection for query, key and value, side by side for each head; slopes of the heads as positions."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

BLOOM = Table(
    stage=StagePlan(layers="h", entry=("word_embeddings", "word_embeddings_layernorm"), arity=2),
    regions=("self_attention", "mlp"),
    by_head={"self_attention": {"alibi": 0}},
    # Cut between heads, each with its query, key and value.
    column=("self_attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("self_attention.dense", "mlp.dense_4h_to_h"),
    attention={"self_attention": "self_attention.dense"},
    divide=("self_attention.num_heads",),
    needed={"slow_but_exact": False},  # which multiplies by parts of the weights of its row layers itself
    dropout={
        "self_attention": RegionDropout(
            probability="self_attention.attention_dropout.p", row="self_attention.dense"
        )
    },
    embedding="word_embeddings",
    heads=("lm_head",),
)
