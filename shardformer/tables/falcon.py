"""Falcon: three layouts of attention, by the number of key-value heads; slopes of the heads or rotary positions."""

from ...pipeline.plan import StagePlan
from ..head_order import HeadOrder
from ..table import RegionDropout, Table

FALCON = Table(
    stage=StagePlan(layers="h", entry=("word_embeddings",), arity=2),
    regions=("self_attention", "mlp"),
    by_head={"self_attention": {"alibi": 1, "attention_mask": 1}},  # the slopes are in the mask too
    column=("self_attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("self_attention.dense", "mlp.dense_4h_to_h"),
    attention={"self_attention": "self_attention.dense"},
    fused={"self_attention.query_key_value": HeadOrder.BY_GROUP},
    # As many as query heads, one for all (multi_query), or what the new architecture says.
    key_value_heads="self_attention.num_kv_heads",
    divide=("self_attention.num_heads",),
    divide_key_value=("self_attention.num_kv_heads",),
    native=("FalconLinear",),
    dropout={
        "self_attention": RegionDropout(
            probability="self_attention.attention_dropout.p", row="self_attention.dense"
        )
    },
    embedding="word_embeddings",
    heads=("lm_head",),
)
