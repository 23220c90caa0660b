"""The tables of models, one family a file, registered by `config.model_type`."""

from ..table import register
from .bert import BERT
from .gpt2 import GPT2
from .llama import LLAMA, QWEN3
from .t5 import T5, UMT5

register(BERT, "bert")
register(GPT2, "gpt2")
register(LLAMA, "llama", "mistral", "qwen2")
register(QWEN3, "qwen3")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
