"""GPT-J: attention and MLP side by side on one norm, a head with a bias."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

GPTJ = Table(
    stage=StagePlan(layers="h", entry=("wte",), arity=2),
    regions=("attn", "mlp"),
    column=("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"),
    row=("attn.out_proj", "mlp.fc_out"),
    attention={"attn": "attn.out_proj"},
    divide=("attn.num_attention_heads",),
    dropout={"attn": RegionDropout(probability="attn.attn_dropout.p", row="attn.out_proj")},
    embedding="wte",
    heads=("lm_head",),
)
