"""Tables of decoders: Llama and its descendants, mixtures of experts, GPT-2 and its contemporaries."""

from dataclasses import replace

from ...pipeline.stage_plan import StagePlan
from .heads import HeadOrder
from .table import RegionDropout, Table

# Llama and its family: separate projections, grouped-query attention, a gated MLP.
LLAMA = Table(
    stage=StagePlan(layers="layers", entry=("embed_tokens",), everywhere=("rotary_emb",)),
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

# Query and key are normalized over all heads together.
OLMO2 = replace(
    LLAMA,
    norms=QWEN3.partial,
    key_value=(*LLAMA.key_value, "self_attn.k_norm"),
)

# Cohere: Llama's layers, with attention and MLP in parallel; query and key may be normalized, with weights per head.
COHERE = replace(
    LLAMA,
    split={"self_attn.q_norm.weight": 0, "self_attn.k_norm.weight": 0},
    key_value=(*LLAMA.key_value, "self_attn.k_norm.weight"),
    optional=("self_attn.q_norm", "self_attn.k_norm"),
)

# GLM and GLM-4 of transformers: Llama's attention, gate and up in one projection.
GLM = replace(
    LLAMA,
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_up_proj"),
    fused={"mlp.gate_up_proj": 2},
)

# Phi-3: query, key and value of unequal sizes in one projection, gate and up in another.
PHI3 = replace(
    LLAMA,
    column=("self_attn.qkv_proj", "mlp.gate_up_proj"),
    fused={"self_attn.qkv_proj": HeadOrder.BY_KIND, "mlp.gate_up_proj": 2},
    key_value=(),
    divide=("self_attn.config.num_attention_heads",),
    divide_key_value=("self_attn.num_key_value_heads",),
)

# Starcoder 2: Llama's attention, a plain MLP.
STARCODER2 = replace(
    LLAMA,
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.c_fc"),
    row=("self_attn.o_proj", "mlp.c_proj"),
)

# Mixtral and Qwen's mixtures of experts: the router is replicated, the features of every expert are sharded.
_SHARED_EXPERT = "mlp.shared_expert"

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

# Some or all layers may have a dense MLP instead.
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
    regions=(*_EITHER.regions, _SHARED_EXPERT),
    column=(*_EITHER.column, f"{_SHARED_EXPERT}.gate_proj", f"{_SHARED_EXPERT}.up_proj"),
    row=(*_EITHER.row, f"{_SHARED_EXPERT}.down_proj"),
    optional=(*_EITHER.optional, _SHARED_EXPERT),
)

# DeepSeek-V3: attention from latent keys and values; a dense MLP in the first layers, then routed and shared experts.
_SHARED_EXPERTS = "mlp.shared_experts"
_MLPS = ("mlp", _SHARED_EXPERTS)

DEEPSEEK_V3 = replace(
    LLAMA,
    regions=("self_attn", "mlp.experts", *_MLPS),
    column=(
        *(f"self_attn.{name}" for name in ("q_proj", "q_b_proj", "kv_b_proj")),
        *(f"{path}.{name}" for path in _MLPS for name in ("gate_proj", "up_proj")),
    ),
    row=("self_attn.o_proj", *(f"{path}.down_proj" for path in _MLPS)),
    # All heads share the latents.
    partial=tuple(
        f"self_attn.{name}" for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    ),
    # Queries may have latents.
    optional=(
        *(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")),
        "mlp.experts",
        _SHARED_EXPERTS,
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ),
    second_input=MIXTRAL.second_input,
    exits=MIXTRAL.exits,
    split=MIXTRAL.split,
    fused=MIXTRAL.fused,
    key_value=(),
    groups=None,
)

# GPT-2: one fused projection for query, key and value, in transformers' Conv1D.
GPT2 = Table(
    stage=StagePlan(layers="h", entry=("wte", "wpe", "drop")),
    regions=("attn", "mlp"),
    column=("attn.c_attn", "mlp.c_fc"),
    row=("attn.c_proj", "mlp.c_proj"),
    attention={"attn": "attn.c_proj"},
    fused={"attn.c_attn": 3},
    divide=("attn.split_size",),
    dropout={"attn": RegionDropout(probability="attn.attn_dropout.p", row="attn.c_proj")},
    embedding="wte",
    heads=("lm_head",),
)

# GPT-Neo: separate projections without a scale; layers alternate between global and local attention.
_NEO_ATTENTION = "attn.attention"

GPT_NEO = Table(
    stage=StagePlan(layers="h", entry=("wte", "wpe"), arity=2),
    regions=("attn", "mlp"),
    column=(*(f"{_NEO_ATTENTION}.{name}_proj" for name in "qkv"), "mlp.c_fc"),
    row=(f"{_NEO_ATTENTION}.out_proj", "mlp.c_proj"),
    attention={"attn": f"{_NEO_ATTENTION}.out_proj"},
    divide=(f"{_NEO_ATTENTION}.num_heads",),
    dropout={
        "attn": RegionDropout(
            probability=f"{_NEO_ATTENTION}.attn_dropout.p", row=f"{_NEO_ATTENTION}.out_proj"
        )
    },
    embedding="wte",
    heads=("lm_head",),
)

# GPT-NeoX: one projection with query, key and value of each head side by side.
GPT_NEOX = Table(
    stage=StagePlan(layers="layers", entry=("embed_in",), everywhere=("rotary_emb",)),
    regions=("attention", "mlp"),
    # Cut between heads, each with its query, key and value.
    column=("attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("attention.dense", "mlp.dense_4h_to_h"),
    fused={"attention.query_key_value": 1},
    attention={"attention": "attention.dense"},
    dropout={"attention": RegionDropout(probability="attention.attention_dropout", row="attention.dense")},
    embedding="embed_in",
    heads=("embed_out", "lm_head"),
)

# GPT-J: attention and MLP in parallel after one norm, a language-model head with a bias.
GPTJ = Table(
    stage=StagePlan(layers="h", entry=("wte",)),
    regions=("attn", "mlp"),
    column=("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"),
    row=("attn.out_proj", "mlp.fc_out"),
    attention={"attn": "attn.out_proj"},
    divide=("attn.num_attention_heads",),
    dropout={"attn": RegionDropout(probability="attn.attention_dropout", row="attn.out_proj")},
    embedding="wte",
    heads=("lm_head",),
)
# Before 5.24 dropout is a module, and layers return tuples.
_OLDER_GPTJ = replace(
    GPTJ,
    stage=StagePlan(layers="h", entry=("wte",), arity=2),
    dropout={"attn": RegionDropout(probability="attn.attn_dropout.p", row="attn.out_proj")},
)
GPTJ = replace(GPTJ, older={"h.0.attn.attn_dropout": _OLDER_GPTJ})

# OPT: the MLP is two linear layers of the block; the embedding may be narrower than the layers.
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

# BLOOM: one projection with query, key and value of each head side by side; ALiBi slopes per head as positions.
BLOOM = Table(
    stage=StagePlan(layers="h", entry=("word_embeddings", "word_embeddings_layernorm"), arity=2),
    regions=("self_attention", "mlp"),
    by_head={"self_attention": {"alibi": 0}},
    # Cut between heads, each with its query, key and value.
    column=("self_attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("self_attention.dense", "mlp.dense_4h_to_h"),
    fused={"self_attention.query_key_value": 1},
    attention={"self_attention": "self_attention.dense"},
    divide=("self_attention.num_heads",),
    needed={"slow_but_exact": False},  # with True the code multiplies slices of row weights itself
    dropout={
        "self_attention": RegionDropout(
            probability="self_attention.attention_dropout.p", row="self_attention.dense"
        )
    },
    embedding="word_embeddings",
    heads=("lm_head",),
)

# Falcon: three layouts of attention, by the number of key-value heads; ALiBi slopes or rotary positions.
FALCON = Table(
    stage=StagePlan(layers="h", entry=("word_embeddings",), arity=2),
    regions=("self_attention", "mlp"),
    by_head={"self_attention": {"alibi": 1}},
    column=("self_attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("self_attention.dense", "mlp.dense_4h_to_h"),
    attention={"self_attention": "self_attention.dense"},
    fused={"self_attention.query_key_value": HeadOrder.BY_GROUP},
    # One per query head, one for all (multi_query), or the number of the new decoder architecture.
    key_value_heads="self_attention.num_kv_heads",
    divide=("self_attention.num_heads",),
    divide_key_value=("self_attention.num_kv_heads",),
    native=("FalconLinear",),
    dropout={
        "self_attention": RegionDropout(
            probability="self_attention.attention_dropout.p", row="self_attention.dense"
        )
    },
    embedding="word_embeddings",
    heads=("lm_head",),
)

# ChatGLM2 and 3, with code from the checkpoint: one projection of all queries, then a few key and value heads.
_GLM_ATTENTION = "self_attention"
_GLM_CORE = f"{_GLM_ATTENTION}.core_attention"
_GLM_GROUPS = f"{_GLM_ATTENTION}.num_multi_query_groups_per_partition"

CHATGLM = Table(
    stage=StagePlan(layers="encoder.layers", entry=("embedding",), arity=2),
    regions=(_GLM_ATTENTION, "mlp"),
    column=(f"{_GLM_ATTENTION}.query_key_value", "mlp.dense_h_to_4h"),
    row=(f"{_GLM_ATTENTION}.dense", "mlp.dense_4h_to_h"),
    fused={f"{_GLM_ATTENTION}.query_key_value": HeadOrder.BY_KIND, "mlp.dense_h_to_4h": 2},
    key_value_heads=_GLM_GROUPS,
    divide=(
        *(f"{path}.num_attention_heads_per_partition" for path in (_GLM_ATTENTION, _GLM_CORE)),
        f"{_GLM_CORE}.hidden_size_per_partition",
    ),
    divide_key_value=(_GLM_GROUPS,),
    needed={"multi_query_attention": True},  # with False the order of heads differs
    dropout={
        _GLM_ATTENTION: RegionDropout(
            probability=f"{_GLM_CORE}.attention_dropout.p", row=f"{_GLM_ATTENTION}.dense"
        )
    },
    embedding="embedding.word_embeddings",
    heads=("transformer.output_layer",),
)

# The table of each model type.
TABLES = {
    "bloom": BLOOM,
    "chatglm": CHATGLM,
    "cohere": COHERE,
    "cohere2": COHERE,
    "deepseek_v3": DEEPSEEK_V3,
    "falcon": FALCON,
    "gemma2": LLAMA,
    "gemma3_text": QWEN3,
    "glm": GLM,
    "glm4": GLM,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "granite": LLAMA,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "opt": OPT,
    "phi3": PHI3,
    "qwen2": LLAMA,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "starcoder2": STARCODER2,
}
