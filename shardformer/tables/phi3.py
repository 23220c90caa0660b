"""Phi-3: query, key and value in one projection of unequal parts, gate and up in another."""

from dataclasses import replace

from ..head_order import HeadOrder
from .llama import LLAMA

PHI3 = replace(
    LLAMA,
    column=("self_attn.qkv_proj", "mlp.gate_up_proj"),
    fused={"self_attn.qkv_proj": HeadOrder.BY_KIND, "mlp.gate_up_proj": 2},
    key_value=(),
    divide=("self_attn.config.num_attention_heads",),
    divide_key_value=("self_attn.num_key_value_heads",),
)
