"""Starcoder 2: Llama's attention, a plain MLP."""

from dataclasses import replace

from .llama import LLAMA

STARCODER2 = replace(
    LLAMA,
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.c_fc"),
    row=("self_attn.o_proj", "mlp.c_proj"),
)
