"""The tables of models, one family a file, registered by `config.model_type`, or by class where there is no config."""

from ..table import register, register_class
from .albert import ALBERT
from .bart import BART, PEGASUS
from .bert import BERT
from .blip2 import BLIP2
from .bloom import BLOOM
from .chatglm import CHATGLM
from .cohere import COHERE
from .deepseek import DEEPSEEK_V3
from .falcon import FALCON
from .gemma3 import GEMMA3
from .glm import GLM
from .gpt2 import GPT2
from .gpt_neo import GPT_NEO
from .gpt_neox import GPT_NEOX
from .gptj import GPTJ
from .llama import LLAMA, OLMO2, QWEN3
from .mixtral import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from .opt import OPT
from .phi3 import PHI3
from .sam import SAM, SAM_VISION
from .starcoder2 import STARCODER2
from .swin import SWIN, SWINV2
from .t5 import T5, UMT5
from .timm import TIMM_VIT
from .vit import BEIT, VIT
from .whisper import WHISPER

register(ALBERT, "albert")
register(BART, "bart", "mbart")
register(BEIT, "beit")
register(BERT, "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta")
register(BLIP2, "blip-2")
register(BLOOM, "bloom")
register(CHATGLM, "chatglm")
register(COHERE, "cohere", "cohere2")
register(DEEPSEEK_V3, "deepseek_v3")
register(FALCON, "falcon")
register(GEMMA3, "gemma3")
register(GLM, "glm", "glm4")
register(GPT2, "gpt2")
register(GPT_NEO, "gpt_neo")
register(GPT_NEOX, "gpt_neox")
register(GPTJ, "gptj")
register(LLAMA, "gemma2", "granite", "llama", "mistral", "qwen2")
register(MIXTRAL, "mixtral")
register(OLMO2, "olmo2")
register(OPT, "opt")
register(PEGASUS, "marian", "pegasus")
register(PHI3, "phi3")
register(QWEN2_MOE, "qwen2_moe")
register(QWEN3, "gemma3_text", "qwen3")
register(QWEN3_MOE, "qwen3_moe")
register(SAM, "sam")
register(SAM_VISION, "sam_vision_model")
register(STARCODER2, "starcoder2")
register(SWIN, "swin")
register(SWINV2, "swinv2")
register(T5, "t5", "mt5")
register(UMT5, "umt5")
register(VIT, "vit", "deit")
register(WHISPER, "whisper")
register_class(TIMM_VIT, "timm.models.vision_transformer.VisionTransformer")
