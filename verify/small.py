"""The sizes of small models, and what single model types need besides. models.py builds them."""

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

MELS = 8  # of a sound, at each of twice as many times
FRAMES = 10  # positions of a sound
IMAGE_SIDE = 32
IMAGE_TOKEN = 3  # what an image's places in a text hold
NUM_QUERIES = 5  # of those
NUM_PATCHES = 4  # the same where neighbouring patches of an image are averaged, (2, 2) of (4, 4)

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {
    **dict.fromkeys(("bart", "marian", "mbart", "mt5", "pegasus", "t5", "umt5"), "seq2seq"),
    **dict.fromkeys(
        ("albert", "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta"), "classification"
    ),
    **dict.fromkeys(("beit", "deit", "swin", "swinv2", "vit"), "image_classification"),
    "blip-2": "image_text",
    "sam": "mask_generation",
    "sam_vision_model": "base",
    "whisper": "speech",
}

# Model types whose batches are not of tokens alone: `MODAL` in batch.py.
BATCHES_OF_THEIR_OWN = ("blip-2", "gemma3", "sam", "sam_vision_model", "whisper")

# How far the weights of models of images are moved from where they begin: tokens, position biases and linear biases
# begin at zero, where a wrong order does not show and SwinV2's cosines of zero vectors have noise for a gradient.
STIRRED = 0.1

# How far from zero matrices are that begin there, by model type, where that is not 0.02: what is projected by small
# weights, norms enlarge again, and with it each rounding.
BEGINS = {"gemma3": 0.2}

# Heads that no Auto class of transformers builds, by type and head: the class.
FURTHER_HEADS = {
    ("beit", "masked_image"): "BeitForMaskedImageModeling",
    ("blip-2", "image_embedding"): "Blip2VisionModelWithProjection",
    ("blip-2", "text_embedding"): "Blip2TextModelWithProjection",
    ("deit", "teacher"): "DeiTForImageClassificationWithTeacher",
    ("gpt2", "double"): "GPT2DoubleHeadsModel",
}

# Its weights begin so large that a small model's steps make much of their rounding.
_T5: dict[str, object] = {"initializer_factor": 0.5}

# A cache copies keys and values, and products of copies in another order of memory may be rounded otherwise; under a
# layout there is none.
UNCACHED: dict[str, object] = {"use_cache": False}

# Settings of the config that a model type needs besides the usual ones, which are in `ModelChoice.config`.
_PATCHES = {"image_size": [9, 15], "patch_size": 3, "encoder_stride": 3}
# Windows that do not fit, and odd heights and widths before they are halved.
_WINDOWS = {
    "image_size": [22, 30],
    "patch_size": 2,
    "window_size": 3,
    "embed_dim": 16,
    "hidden_size": 64,
    "depths": [2, 1, 1],
    "num_layers": 3,
    "num_heads": [4, 4, 8],
    "mlp_ratio": 2.0,
    "encoder_stride": 8,
    "out_indices": [0, 1, 3],
}
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
    "bloom": UNCACHED,
    "falcon": UNCACHED,
    # As many layers as there are by default; every other one sees the last tokens alone.
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5, **UNCACHED},
    "gptj": {"rotary_dim": 4, **UNCACHED},
    # Weights of the usual size are small beside a step, and norms of what is small enlarge each rounding of one.
    "glm4": {"initializer_range": 0.1},
    "opt": {"ffn_dim": 48, "init_std": 0.1},
    "albert": {
        "embedding_size": 24,
        "initializer_range": 0.1,
    },  # else its samples are alike behind the layers
    "electra": {"embedding_size": 24},
    "vit": _PATCHES,
    "deit": _PATCHES,
    "beit": {
        "image_size": [9, 15],
        "patch_size": 3,
        "use_relative_position_bias": True,
        "auxiliary_channels": 8,
        "out_indices": [1, 2, 3, 4],
    },
    "swin": _WINDOWS,
    # Its norms stand behind the layers: what is small there brings its rounding with it.
    "swinv2": {**_WINDOWS, "initializer_range": 0.02, "layer_norm_eps": 0.1},
    "blip-2": {
        "text_config": {"model_type": "t5"},
        "num_query_tokens": NUM_QUERIES,
        "image_token_index": IMAGE_TOKEN,
        "image_text_hidden_size": 16,
    },
    "blip_2_vision_model": {"image_size": IMAGE_SIDE, "patch_size": 8, "initializer_range": 0.02},
    "gemma3": {
        # Layers that see all tokens and the last ones by turns.
        "text_config": {"sliding_window_pattern": 2},
        "mm_tokens_per_image": NUM_PATCHES,
        "image_token_index": IMAGE_TOKEN,
    },
    # Published models have no head on their vision model; of another width than the language model.
    "siglip_vision_model": {
        "image_size": IMAGE_SIDE,
        "patch_size": 8,
        "hidden_size": 48,
        "num_hidden_layers": 2,  # with four, the gradients of the first are further from exact than is allowed
        "vision_use_head": False,
    },
    "marian": {"decoder_vocab_size": VOCABULARY},
    "mt5": _T5,
    "sam_mask_decoder": {"mlp_dim": 48, "num_hidden_layers": 2, "iou_head_hidden_dim": 16},
    "sam_prompt_encoder": {"image_size": IMAGE_SIDE, "patch_size": 4},
    "sam_vision_model": {
        "image_size": IMAGE_SIDE,
        "patch_size": 4,
        "output_channels": 32,
        "mlp_dim": 48,
        "num_pos_feats": 16,
        "window_size": 3,  # does not divide the side of 8 patches
        "global_attn_indexes": (1, 3),
        "initializer_range": 0.02,
    },
    "t5": _T5,
    "umt5": _T5,
    "whisper": {
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES,
        "max_target_positions": 16,
        "classifier_proj_size": 16,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}

# And what one of its heads needs: who rebuilds an image takes it to be square.
HEAD_SETTINGS: dict[tuple[str, str], dict[str, object]] = {
    ("albert", "pretraining"): {"num_labels": 2},
    ("vit", "masked_image"): {"image_size": 15},
    ("deit", "masked_image"): {"image_size": 15},
    ("beit", "masked_image"): {
        "use_mask_token": True,
        "use_relative_position_bias": False,
        "use_shared_relative_position_bias": True,
    },
    # Batch norms of more than a few numbers; older releases take the image to be square.
    ("beit", "segmentation"): {"image_size": 18, "pool_scales": [2, 3], "initializer_range": 0.2},
    ("swin", "masked_image"): {"image_size": 24},
    ("swinv2", "masked_image"): {"image_size": 24},
}
