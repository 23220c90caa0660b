"""The sizes of small models, and what single model types need besides. models.py builds them."""

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {"bert": "classification", "t5": "seq2seq", "mt5": "seq2seq", "umt5": "seq2seq"}

# A cache copies keys and values, and products of copies in another order of memory may be rounded otherwise; under a
# layout there is none.
UNCACHED: dict[str, object] = {"use_cache": False}

# Settings of the config that a model type needs besides the usual ones, which are in `ModelChoice.config`.
SETTINGS: dict[str, dict[str, object]] = {
    "bloom": UNCACHED,
    "falcon": UNCACHED,
    # As many layers as there are by default; every other one sees the last tokens alone.
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5, **UNCACHED},
    "gptj": {"rotary_dim": 4, **UNCACHED},
    # Weights of the usual size are small beside a step, and norms of what is small enlarge each rounding of one.
    "glm4": {"initializer_range": 0.1},
    "opt": {"ffn_dim": 48, "init_std": 0.1},
}
