"""DeepSeek-V3: attention from latent keys and values; one MLP in the first layers, then routed and shared experts."""

from dataclasses import replace

from .llama import LLAMA
from .mixtral import MIXTRAL

_SHARED = "mlp.shared_experts"
_MLPS = ("mlp", _SHARED)

DEEPSEEK_V3 = replace(
    LLAMA,
    regions=("self_attn", "mlp.experts", *_MLPS),
    column=(
        *(f"self_attn.{name}" for name in ("q_proj", "q_b_proj", "kv_b_proj")),
        *(f"{path}.{name}" for path in _MLPS for name in ("gate_proj", "up_proj")),
    ),
    row=("self_attn.o_proj", *(f"{path}.down_proj" for path in _MLPS)),
    # The latents are of all heads together.
    partial=tuple(
        f"self_attn.{name}" for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    ),
    # Queries have latents or none.
    optional=(
        *(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")),
        "mlp.experts",
        _SHARED,
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ),
    second_input=MIXTRAL.second_input,
    exits=MIXTRAL.exits,
    split=MIXTRAL.split,
    fused=MIXTRAL.fused,
    key_value=(),
    groups=None,
)
