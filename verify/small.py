"""The sizes of small models, and what single model types need besides. models.py builds them."""

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {"bert": "classification", "t5": "seq2seq", "mt5": "seq2seq", "umt5": "seq2seq"}

# Settings of the config that a model type needs besides the usual ones, which are in `ModelChoice.config`.
# Of mixtures of experts and of attention with latent keys and values, by the names that configs have for them. A
# product of many experts at once needs rows of a multiple of 16 bytes, also of a rank's part.
EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
# With small weights norms of a region's output divide by next to nothing and swell the rounding.
_STEADY: dict[str, object] = {"initializer_range": 0.2}
_GEMMA: dict[str, object] = {"sliding_window": 5, "final_logit_softcapping": 2.0, **_STEADY}
SETTINGS: dict[str, dict[str, object]] = {
    "afmoe": _STEADY,
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "kolibri1": _STEADY,
    "minimax_m2": _STEADY,
    "olmo3": _STEADY,
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1]},
}
