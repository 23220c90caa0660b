"""Llama and its family: separate projections, grouped-query attention, a gated MLP."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

LLAMA = Table(
    stage=StagePlan(layers="layers", entry=("embed_tokens",)),
    regions=("self_attn", "mlp"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    row=("self_attn.o_proj", "mlp.down_proj"),
    attention={"self_attn": "self_attn.o_proj"},
    key_value=("self_attn.k_proj", "self_attn.v_proj"),
    groups="self_attn.num_key_value_groups",
    dropout={"self_attn": RegionDropout(probability="self_attn.attention_dropout", row="self_attn.o_proj")},
    embedding="embed_tokens",
    heads=("lm_head",),
)

# Query and key are normalized per head, by one weight for all heads.
QWEN3 = replace(LLAMA, partial=("self_attn.q_norm", "self_attn.k_norm"))

# The same over all heads together.
OLMO2 = replace(
    LLAMA,
    norms=QWEN3.partial,
    key_value=(*LLAMA.key_value, "self_attn.k_norm"),
)
