"""The tables of models, one family a file, registered by `config.model_type`."""

from ..table import register
from .bart import BART, PEGASUS
from .bert import BERT
from .blip2 import BLIP2
from .gpt2 import GPT2
from .llama import LLAMA, QWEN3
from .sam import SAM, SAM_VISION
from .t5 import T5, UMT5
from .whisper import WHISPER

register(BART, "bart", "mbart")
register(PEGASUS, "marian", "pegasus")
register(BERT, "bert")
register(BLIP2, "blip-2")
register(GPT2, "gpt2")
register(LLAMA, "llama", "mistral", "qwen2")
register(QWEN3, "qwen3")
register(SAM, "sam")
register(SAM_VISION, "sam_vision_model")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
register(WHISPER, "whisper")
