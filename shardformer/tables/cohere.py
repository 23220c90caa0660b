"""Cohere: Llama's layers, attention and MLP side by side; query and key may be normalized, each head by its weights."""

from dataclasses import replace

from .llama import LLAMA

COHERE = replace(
    LLAMA,
    split={"self_attn.q_norm.weight": 0, "self_attn.k_norm.weight": 0},
    key_value=(*LLAMA.key_value, "self_attn.k_norm.weight"),
    optional=("self_attn.q_norm", "self_attn.k_norm"),
)
