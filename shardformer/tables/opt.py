"""OPT: two linear layers of a block are its MLP; the embedding may be narrower than the layers."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

OPT = Table(
    stage=StagePlan(
        layers="decoder.layers",
        entry=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        optional=("decoder.project_in",),
    ),
    regions=("self_attn", "fc1"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
    row=("self_attn.out_proj", "fc2"),
    attention={"self_attn": "self_attn.out_proj"},
    divide=("self_attn.num_heads",),
    dropout={"self_attn": RegionDropout(probability="self_attn.dropout", row="self_attn.out_proj")},
    embedding="decoder.embed_tokens",
    heads=("lm_head",),
)
