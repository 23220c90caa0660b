"""Mixtral and Qwen's mixtures of experts: the router stays outside, every expert is split inside."""

from dataclasses import replace

from .llama import LLAMA, QWEN3

_SHARED = "mlp.shared_expert"

MIXTRAL = replace(
    LLAMA,
    regions=("self_attn", "mlp.experts"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    row=("self_attn.o_proj",),
    second_input={"mlp.experts": "top_k_weights"},
    exits=("mlp.experts",),
    split={"mlp.experts.gate_up_proj": 1, "mlp.experts.down_proj": 2},
    fused={"mlp.experts.gate_up_proj": 2},
)

# Some layers, or all, may have one MLP instead.
_EITHER = replace(
    MIXTRAL,
    regions=(*MIXTRAL.regions, "mlp"),
    column=LLAMA.column,
    row=LLAMA.row,
    optional=("mlp.experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
QWEN3_MOE = replace(_EITHER, partial=QWEN3.partial)
QWEN2_MOE = replace(
    _EITHER,
    regions=(*_EITHER.regions, _SHARED),
    column=(*_EITHER.column, f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
    row=(*_EITHER.row, f"{_SHARED}.down_proj"),
    optional=(*_EITHER.optional, _SHARED),
)
