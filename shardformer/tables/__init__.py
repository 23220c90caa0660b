"""The tables of models, one family a file, registered by `config.model_type`, or by class where there is no config."""

from ..table import register, register_class
from .albert import ALBERT
from .bert import BERT
from .gpt2 import GPT2
from .llama import LLAMA, QWEN3
from .swin import SWIN, SWINV2
from .t5 import T5, UMT5
from .timm import TIMM_VIT
from .vit import BEIT, VIT

register(ALBERT, "albert")
register(BERT, "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta")
register(GPT2, "gpt2")
register(LLAMA, "llama", "mistral", "qwen2")
register(QWEN3, "qwen3")
register(SWIN, "swin")
register(SWINV2, "swinv2")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
register(VIT, "vit", "deit")
register(BEIT, "beit")
register_class(TIMM_VIT, "timm.models.vision_transformer.VisionTransformer")
