"""The tables of models, one family a file, registered by `config.model_type`."""

from ..table import register
from .bert import BERT
from .bloom import BLOOM
from .chatglm import CHATGLM
from .cohere import COHERE
from .falcon import FALCON
from .glm import GLM
from .gpt2 import GPT2
from .gpt_neo import GPT_NEO
from .gpt_neox import GPT_NEOX
from .gptj import GPTJ
from .llama import LLAMA, QWEN3
from .opt import OPT
from .phi3 import PHI3
from .starcoder2 import STARCODER2
from .t5 import T5, UMT5

register(BERT, "bert")
register(BLOOM, "bloom")
register(CHATGLM, "chatglm")
register(COHERE, "cohere", "cohere2")
register(FALCON, "falcon")
register(GLM, "glm", "glm4")
register(GPT2, "gpt2")
register(GPT_NEO, "gpt_neo")
register(GPT_NEOX, "gpt_neox")
register(GPTJ, "gptj")
register(LLAMA, "llama", "mistral", "qwen2")
register(OPT, "opt")
register(PHI3, "phi3")
register(QWEN3, "qwen3")
register(STARCODER2, "starcoder2")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
