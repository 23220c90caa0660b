"""The tables of models, one family a file, registered by `config.model_type`, or by class where there is no config."""

from ..table import register, register_class
from .albert import ALBERT
from .bart import BART, PEGASUS
from .bert import BERT
from .blip2 import BLIP2
from .gpt2 import GPT2
from .llama import LLAMA, QWEN3
from .sam import SAM, SAM_VISION
from .swin import SWIN, SWINV2
from .t5 import T5, UMT5
from .timm import TIMM_VIT
from .vit import BEIT, VIT
from .whisper import WHISPER

register(ALBERT, "albert")
register(BART, "bart", "mbart")
register(PEGASUS, "marian", "pegasus")
register(BERT, "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta")
register(BLIP2, "blip-2")
register(GPT2, "gpt2")
register(LLAMA, "llama", "mistral", "qwen2")
register(QWEN3, "qwen3")
register(SAM, "sam")
register(SAM_VISION, "sam_vision_model")
register(SWIN, "swin")
register(SWINV2, "swinv2")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
register(VIT, "vit", "deit")
register(BEIT, "beit")
register(WHISPER, "whisper")
register_class(TIMM_VIT, "timm.models.vision_transformer.VisionTransformer")
