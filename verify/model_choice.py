"""Small models of any type and head, built from their config. batch.py makes their batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..derive.build import Copy
from ..derive.small import LAYERS
from .generic import LABELLED, generic_copy, generic_heads, has_no_recipe

# Odd and unequal sizes on purpose: a vocabulary that no world size divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of the texts of an encoder-decoder model's decoder
END = 2  # the token that ends a sequence

MELS = 8  # features of an audio input, at each of 2 × FRAMES times
FRAMES = 10  # positions of an audio input
IMAGE_SIDE = 32
IMAGE_TOKEN = 3  # at the positions of an image in a text
NUM_QUERIES = 5  # image tokens in a text
NUM_PATCHES = 4  # the same if neighbouring patches of an image are averaged, (4, 4) to (2, 2)

# The usual head of a model type, if it is not "causal".
DEFAULT_HEAD = {
    **dict.fromkeys(("bart", "marian", "mbart", "mt5", "pegasus", "t5", "umt5"), "seq2seq"),
    **dict.fromkeys(("nllb-moe", "switch_transformers"), "seq2seq"),
    **dict.fromkeys(
        ("albert", "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta"), "classification"
    ),
    **dict.fromkeys(("beit", "deit", "swin", "swinv2", "vit"), "image_classification"),
    **dict.fromkeys(("blip-2", "step3p7"), "image_text"),
    **dict.fromkeys(("clip", "siglip"), "zero_shot_image"),
    "sam": "mask_generation",
    "sam_vision_model": "base",
    "wav2vec2": "ctc",
    "whisper": "speech",
}

# Model types with other inputs than tokens: `MODAL` in batch.py.
WITH_OTHER_INPUTS = (
    "blip-2",
    "clip",
    "gemma3",
    "sam",
    "sam_vision_model",
    "siglip",
    "wav2vec2",
    "whisper",
)

# Size of a random change to the initial weights of image models. Tokens, position biases and linear biases start at
# zero, where a wrong order has no effect, and SwinV2's cosines of zero vectors have noise as gradients.
STIRRED = 0.1

# Size of matrices that start at zero, by model type, if not 0.02. With small weights, norms amplify the small
# projections, and with them every rounding error.
BEGINS = {"gemma3": 0.2}

# Heads that no Auto class of transformers builds, by type and head: the class.
FURTHER_HEADS = {
    ("beit", "masked_image"): "BeitForMaskedImageModeling",
    ("blip-2", "image_embedding"): "Blip2VisionModelWithProjection",
    ("blip-2", "text_embedding"): "Blip2TextModelWithProjection",
    ("deit", "teacher"): "DeiTForImageClassificationWithTeacher",
    ("gpt2", "double"): "GPT2DoubleHeadsModel",
}

# Smaller initial weights: with T5's own, the steps of a small model amplify rounding.
_T5: dict[str, object] = {"initializer_factor": 0.5}

# A cache copies keys and values, and products of copies with another memory layout may be rounded differently. Under
# a parallel layout there is no cache.
UNCACHED: dict[str, object] = {"use_cache": False}

# Settings of the config that a model type needs besides the common ones in `ModelChoice.config`.
_PATCHES = {"image_size": [9, 15], "patch_size": 3, "encoder_stride": 3}
# Windows that do not divide the image, and odd heights and widths before halving.
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
# Settings of mixtures of experts and of attention with latent keys and values, under all names in configs. A batched
# product of experts needs rows of a multiple of 16 bytes, also in a rank's shard.
EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
# With small weights, norms of a region's output divide by almost zero and amplify rounding.
_STEADY: dict[str, object] = {"initializer_range": 0.2}
_GEMMA: dict[str, object] = {"sliding_window": 5, "final_logit_softcapping": 2.0, **_STEADY}
SETTINGS: dict[str, dict[str, object]] = {
    # Older names of settings, in nested configs without defaults that run.
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2},
    "longcat_flash": {"zero_expert_num": 2},  # experts without parameters
    # A capacity that no batch uses up: it is counted over the samples of a microbatch and replica.
    "nllb-moe": {"expert_capacity": 10_000, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "switch_transformers": {"router_jitter_noise": 0.0, **_T5},
    "step3p5": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "share_expert_dim": 12,
        "sliding_window": 5,
    },
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "bloom": UNCACHED,
    "falcon": UNCACHED,
    # As many layers as by default; every other one attends only to the last tokens.
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5, **UNCACHED},
    "gptj": {"rotary_dim": 4, **UNCACHED},
    # Weights of the usual size are small compared with a step, and norms of small values amplify rounding.
    "glm4": {"initializer_range": 0.1},
    "opt": {"ffn_dim": 48, "init_std": 0.1},
    # With smaller weights, all samples are alike after the layers.
    "albert": {"embedding_size": 24, "initializer_range": 0.1},
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
    # Its norms follow the layers: they amplify small values, with their rounding.
    "swinv2": {**_WINDOWS, "initializer_range": 0.02, "layer_norm_eps": 0.1},
    "blip-2": {
        "text_config": {"model_type": "t5"},
        "num_query_tokens": NUM_QUERIES,
        "image_token_index": IMAGE_TOKEN,
        "image_text_hidden_size": 16,
    },
    "blip_2_vision_model": {"image_size": IMAGE_SIDE, "patch_size": 8, "initializer_range": 0.02},
    "gemma3": {
        # Layers that attend to all tokens and to the last ones, alternately.
        "text_config": {"sliding_window_pattern": 2},
        "mm_tokens_per_image": NUM_PATCHES,
        "image_token_index": IMAGE_TOKEN,
    },
    "clip": {"projection_dim": 16},
    "clip_vision_model": {"image_size": IMAGE_SIDE, "patch_size": 8},
    "siglip": {"vision_config": {"hidden_size": 32, "vision_use_head": True}},
    # Published models have no head on the vision model. Its width differs from the language model's.
    "siglip_vision_model": {
        "image_size": IMAGE_SIDE,
        "patch_size": 8,
        "hidden_size": 48,
        "num_hidden_layers": 2,  # with four, rounding in the first layer's gradients exceeds the tolerance
        "vision_use_head": False,
    },
    "marian": {"decoder_vocab_size": VOCABULARY},
    "mt5": _T5,
    "sam_mask_decoder": {"mlp_dim": 48, "num_hidden_layers": 2, "iou_head_hidden_dim": 16},
    "sam_prompt_encoder": {"image_size": IMAGE_SIDE, "patch_size": 4},
    "sam_vision_model": {
        "image_size": IMAGE_SIDE,
        "patch_size": 4,
        "output_channels": 32,
        "mlp_dim": 48,
        "num_pos_feats": 16,
        "window_size": 3,  # does not divide the side of 8 patches
        "global_attn_indexes": (1, 3),
        "initializer_range": 0.02,
    },
    "t5": _T5,
    "umt5": _T5,
    "wav2vec2": {
        "conv_dim": (8, 8),
        "conv_stride": (4, 4),
        "conv_kernel": (8, 4),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,
    },
    "whisper": {
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES,
        "max_target_positions": 16,
        "classifier_proj_size": 16,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}

# Settings that one head of a model type needs; heads that reconstruct an image assume that it is square.
HEAD_SETTINGS: dict[tuple[str, str], dict[str, object]] = {
    ("albert", "pretraining"): {"num_labels": 2},
    ("vit", "masked_image"): {"image_size": 15},
    ("deit", "masked_image"): {"image_size": 15},
    ("beit", "masked_image"): {
        "use_mask_token": True,
        "use_relative_position_bias": False,
        "use_shared_relative_position_bias": True,
    },
    # Batch norms over more than a few values; older releases assume a square image.
    ("beit", "segmentation"): {"image_size": 18, "pool_scales": [2, 3], "initializer_range": 0.2},
    ("swin", "masked_image"): {"image_size": 24},
    ("swinv2", "masked_image"): {"image_size": 24},
}


# The Auto class that builds each head; None if FURTHER_HEADS names the class.
HEADS: dict[str, str | None] = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "double": None,
    "classification": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "question": "AutoModelForQuestionAnswering",
    "choice": "AutoModelForMultipleChoice",
    "next_sentence": "AutoModelForNextSentencePrediction",
    "image_classification": "AutoModelForImageClassification",
    "teacher": None,
    "masked_image": "AutoModelForMaskedImageModeling",
    "segmentation": "AutoModelForSemanticSegmentation",
    "backbone": "AutoBackbone",
    "text_encoding": "AutoModelForTextEncoding",
    "speech": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
    "audio_classification": "AutoModelForAudioClassification",
    "mask_generation": "AutoModelForMaskGeneration",
    "image_text": "AutoModelForImageTextToText",
    "zero_shot_image": "AutoModelForZeroShotImageClassification",
    "image_embedding": None,
    "text_embedding": None,
    "base": "AutoModel",
}


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A small model to verify.

    Args:
        model_type: `config.model_type` of transformers.
        head: a key of HEADS; None is the usual one of the type.
        tied: tie the head of a language model to the embedding's weight. Without it, only the config of a generic
            choice decides.
        num_layers: the number of layers; in an encoder-decoder model, of encoder and decoder each.
        settings: further settings of its config, as (name, value).
    """

    model_type: str
    head: str | None = None
    tied: bool = False
    num_layers: int = LAYERS
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def head_name(self) -> str:
        """The head; the usual one by default."""
        usual = next(iter(heads_of(self.model_type)), "") if self.is_generic else "causal"
        return self.head or DEFAULT_HEAD.get(self.model_type, usual)

    @property
    def is_generic(self) -> bool:
        """True if model and batches are made by general rules, not by the settings of this file."""
        return self.model_type not in DEFAULT_HEAD and has_no_recipe(self.model_type)

    def copy(self) -> Copy:
        """Return the small copy of a generic choice; a ValueError if there is none with its settings."""
        return generic_copy(self.model_type, self.head_name, self.tied, self.num_layers, self.settings)

    @property
    def described_head(self) -> str:
        """The head, marked if it is tied."""
        return f"{self.head_name}, tied" if self.tied else self.head_name

    @property
    def is_of_images(self) -> bool:
        """True if images are its only input."""
        main_input = getattr(heads_of(self.model_type)[self.head_name], "main_input_name", "")
        return (
            not self.is_generic and main_input == "pixel_values" and self.model_type not in WITH_OTHER_INPUTS
        )

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model type has an encoder and a decoder."""
        return bool(self.config().is_encoder_decoder)

    @property
    def weighed_by(self) -> Literal["samples", "labels"] | None:
        """The weight of a microbatch if one process computes them one by one; None if it computes the batch at once.

        By samples: losses that are no sum of means over labels, or compare samples with each other (contrastive).
        """
        if self.is_generic:
            return None if self.head_name in LABELLED else "samples"
        return "samples" if self.head_name in ("double", "masked_image", "zero_shot_image") else None

    def errors(self) -> list[str]:
        """List all errors of the choice, each with a value that works."""
        errors = []
        if self.model_type not in transformers.CONFIG_MAPPING:
            close = " or ".join(get_close_matches(self.model_type.lower(), transformers.CONFIG_MAPPING))
            errors.append(
                f"model {self.model_type!r} is not a model type of transformers {transformers.__version__}: give the "
                f"`model_type` of a config.json, {f'as {close}, ' if close else ''}one of `echelon models --all`"
            )
        elif self.is_generic:
            try:
                self.copy()
            except ValueError as error:
                return [str(error)]
            return []
        if self.head_name not in HEADS:
            errors.append(f"head {self.head_name!r} is unknown: use one of {', '.join(HEADS)}")
        if errors:
            return errors
        if self.num_layers < 1:
            return [f"layers={self.num_layers} must be at least 1"]
        heads = heads_of(self.model_type)
        if self.head_name not in heads:
            return [
                f"transformers has no {self.model_type!r} with head {self.head_name!r}: "
                + (
                    f"use one of {', '.join(heads)}"
                    if heads
                    else "nor with any other head that can be verified"
                )
            ]
        try:
            self.build_on_meta()
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            return [
                f"transformers cannot build a small {self.model_type!r} with head {self.head_name!r}: {reason}"
            ]
        return []

    def config(self) -> PretrainedConfig:
        """Return its config: small, without dropout."""
        if self.is_generic:
            return cast(PretrainedConfig, self.copy().model.config)
        blank = AutoConfig.for_model(self.model_type)
        chosen = self._chosen(self.model_type, blank, dict(self.settings))
        return AutoConfig.for_model(self.model_type, **chosen)

    def _chosen(
        self, model_type: str, blank: PretrainedConfig, further: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the settings of a config like `blank`, which has the defaults, and of its nested configs.

        Later ones replace earlier ones: common ones, no dropout, those of the model type and the head, `further`.
        """
        common = self._common()
        if hasattr(blank, "kv_lora_rank"):  # every head has its own keys and values
            common["num_key_value_heads"] = common["num_attention_heads"]
        special = {
            **SETTINGS.get(model_type, {}),
            **HEAD_SETTINGS.get((model_type, self.head_name), {}),
            **further,
        }
        config_names = {
            name: blank.attribute_map.get(name, name) for name in common
        }  # n_embd for hidden_size
        supported = {
            # Older releases check some settings before they map common names.
            config_names[name]: value
            for name, value in common.items()
            if hasattr(blank, name) and config_names[name] not in special and not _is_derived(blank, name)
        }
        if blank.is_encoder_decoder:
            supported["decoder_start_token_id"] = 0
        dropouts = {
            name: 0.0 for name in vars(blank) if "drop" in name and isinstance(getattr(blank, name), float)
        }
        chosen = {
            **supported,
            **dropouts,
            "classifier_dropout": 0.0,
            **special,
        }
        for name in blank.sub_configs:
            inner = getattr(blank, name) or blank.sub_configs[name]()
            inner_further = cast(Mapping[str, Any], chosen.get(name, {}))
            # In older releases some nested configs have no type, or one for which no config can be looked up.
            usual_type = inner.model_type or f"{model_type}_{name.removesuffix('_config')}"
            inner_type = inner_further.get("model_type", usual_type)
            inner = type(inner)() if inner_type == usual_type else AutoConfig.for_model(inner_type)
            chosen[name] = {**self._chosen(inner_type, inner, inner_further), "model_type": inner_type}
        return chosen

    def _common(self) -> dict[str, object]:
        """Return the settings by common names; each applies to a config that has an attribute of its name."""
        return dict(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=self.num_layers,
            decoder_layers=self.num_layers,
            num_decoder_layers=self.num_layers,
            num_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_key_value_heads=2,
            intermediate_size=48,
            d_ff=48,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=self.tied,
            num_labels=2 if self.head_name == "question" else 3,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=END,
            is_decoder=self.head_name == "causal",
            use_qformer_text_input=self.head_name in ("zero_shot_image", "text_embedding"),
            **EXPERTS,
        )

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model, in float32 and training mode; equal seeds give equal models."""
        if self.is_generic:
            return self.copy().make(seed)
        torch.manual_seed(seed)
        model = self._from_config().float()
        for parameter in model.parameters():
            if self.is_of_images:
                parameter.data += STIRRED * torch.randn_like(parameter)
            elif parameter.ndim > 1 and not parameter.any():  # some tables start at zero
                nn.init.normal_(parameter, std=BEGINS.get(self.model_type, 0.02))
        return model.train()

    def build_on_meta(self) -> nn.Module:
        """Build the model on the meta device, for checks."""
        if self.is_generic:
            return self.copy().make(0).to("meta")
        with torch.device("meta"):
            return self._from_config()

    def _from_config(self) -> nn.Module:
        """Build the model with random weights; without `tied`, its head has a weight of its own."""
        model: Any = heads_of(self.model_type)[self.head_name](self.config())
        head = None if self.tied else model.get_output_embeddings()
        if head is not None and head.weight is model.get_input_embeddings().weight:
            # T5 always ties the head, whatever its config says. T5 1.1 has a separate weight in the head.
            head.weight = nn.Parameter(torch.randn_like(head.weight) * head.in_features**-0.5)
        return model


def _is_derived(config: PretrainedConfig, name: str) -> bool:
    """Return True if the config computes a setting from others, so that it cannot be given."""
    attribute = getattr(type(config), name, None)
    return isinstance(attribute, property) and attribute.fset is None


def heads_of(model_type: str) -> dict[str, type[nn.Module]]:
    """Return the heads that transformers has for a model type, with their classes; two heads may share a class."""
    if ModelChoice(model_type=model_type).is_generic:
        return generic_heads(model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    class_of = {}
    for head, auto in HEADS.items():
        mapping = {} if auto is None else getattr(transformers, auto)._model_mapping
        if config_class in mapping:
            classes = mapping[config_class]
            class_of[head] = classes[0] if isinstance(classes, tuple) else classes
        elif (model_type, head) in FURTHER_HEADS:
            class_of[head] = getattr(transformers, FURTHER_HEADS[model_type, head])
    return class_of
