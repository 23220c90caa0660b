"""The sizes of small models, and what single model types need besides. models.py builds them."""

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {"bert": "classification", "t5": "seq2seq", "mt5": "seq2seq", "umt5": "seq2seq"}

# Settings of the config that a model type needs besides the usual ones, which are in `ModelChoice.config`.
SETTINGS: dict[str, dict[str, object]] = {}
