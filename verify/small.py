"""The sizes of small models, and what single model types need besides. models.py builds them."""

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {
    **dict.fromkeys(("t5", "mt5", "umt5"), "seq2seq"),
    **dict.fromkeys(
        ("albert", "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta"), "classification"
    ),
    **dict.fromkeys(("beit", "deit", "swin", "swinv2", "vit"), "image_classification"),
}

# How far the weights of models of images are moved from where they begin: tokens, position biases and linear biases
# begin at zero, where a wrong order does not show and SwinV2's cosines of zero vectors have noise for a gradient.
STIRRED = 0.1

# Heads that no Auto class of transformers builds, by type and head: the class.
FURTHER_HEADS = {
    ("beit", "masked_image"): "BeitForMaskedImageModeling",
    ("deit", "teacher"): "DeiTForImageClassificationWithTeacher",
}

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
SETTINGS: dict[str, dict[str, object]] = {
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
    # Batch norms of more than a few numbers.
    ("beit", "segmentation"): {"image_size": [15, 21], "pool_scales": [2, 3], "initializer_range": 0.2},
    ("swin", "masked_image"): {"image_size": 24},
    ("swinv2", "masked_image"): {"image_size": 24},
}
