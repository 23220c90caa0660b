"""GPT-Neo: separate projections without a scale, layers that attend to all tokens or to the last ones by turns."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

_ATTENTION = "attn.attention"

GPT_NEO = Table(
    stage=StagePlan(layers="h", entry=("wte", "wpe"), arity=2),
    regions=("attn", "mlp"),
    column=(*(f"{_ATTENTION}.{name}_proj" for name in "qkv"), "mlp.c_fc"),
    row=(f"{_ATTENTION}.out_proj", "mlp.c_proj"),
    attention={"attn": f"{_ATTENTION}.out_proj"},
    divide=(f"{_ATTENTION}.num_heads",),
    dropout={"attn": RegionDropout(probability=f"{_ATTENTION}.attn_dropout.p", row=f"{_ATTENTION}.out_proj")},
    embedding="wte",
    heads=("lm_head",),
)
