"""The tables of models, one family a file, registered by `config.model_type`."""

from ..table import register
from .bert import BERT
from .deepseek import DEEPSEEK_V3
from .gpt2 import GPT2
from .llama import LLAMA, OLMO2, QWEN3
from .mixtral import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from .t5 import T5, UMT5

register(BERT, "bert")
register(GPT2, "gpt2")
register(DEEPSEEK_V3, "deepseek_v3")
register(LLAMA, "gemma2", "granite", "llama", "mistral", "qwen2")
register(MIXTRAL, "mixtral")
register(OLMO2, "olmo2")
register(QWEN2_MOE, "qwen2_moe")
register(QWEN3, "gemma3_text", "qwen3")
register(QWEN3_MOE, "qwen3_moe")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
