"""GLM and GLM-4 as transformers has them: Llama's attention, gate and up in one projection."""

from dataclasses import replace

from .llama import LLAMA

GLM = replace(
    LLAMA,
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_up_proj"),
    fused={"mlp.gate_up_proj": 2},
)
