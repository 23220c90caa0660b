"""GPT-2: one fused projection for query, key and value, in transformers' Conv1D."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

GPT2 = Table(
    stage=StagePlan(layers="h", entry=("wte", "wpe", "drop")),
    regions=("attn", "mlp"),
    column=("attn.c_attn", "mlp.c_fc"),
    row=("attn.c_proj", "mlp.c_proj"),
    attention={"attn": "attn.c_proj"},
    fused={"attn.c_attn": 3},
    divide=("attn.split_size",),
    dropout={"attn": RegionDropout(probability="attn.attn_dropout.p", row="attn.c_proj")},
    embedding="wte",
    heads=("lm_head",),
)
