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

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {
    "bart": "seq2seq",
    "bert": "classification",
    "blip-2": "image_text",
    "marian": "seq2seq",
    "mbart": "seq2seq",
    "mt5": "seq2seq",
    "pegasus": "seq2seq",
    "sam": "mask_generation",
    "sam_vision_model": "base",
    "t5": "seq2seq",
    "umt5": "seq2seq",
    "whisper": "speech",
}

# Its weights begin so large that a small model's steps make much of their rounding.
_T5: dict[str, object] = {"initializer_factor": 0.5}

# Settings of the config that a model type needs besides the usual ones, which are in `ModelChoice.config`.
SETTINGS: dict[str, dict[str, object]] = {
    "blip-2": {
        "text_config": {"model_type": "t5"},
        "num_query_tokens": NUM_QUERIES,
        "image_token_index": IMAGE_TOKEN,
        "image_text_hidden_size": 16,
    },
    "blip_2_vision_model": {"image_size": IMAGE_SIDE, "patch_size": 8, "initializer_range": 0.02},
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
