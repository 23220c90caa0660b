"""Small models of any type and head, built from their config. Batches for them are batch.py's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

MELS = 8  # of a sound, at each of twice as many times
FRAMES = 10  # positions of a sound
IMAGE_SIDE = 32
IMAGE_TOKEN = 3  # at an image's places in a text
NUM_QUERIES = 5  # of those
NUM_PATCHES = 4  # the same where neighbouring patches of an image are averaged, (2, 2) of (4, 4)

# The head that a model type is mostly used with, where that is not "causal".
DEFAULT_HEAD = {
    **dict.fromkeys(("bart", "marian", "mbart", "mt5", "pegasus", "t5", "umt5"), "seq2seq"),
    **dict.fromkeys(
        ("albert", "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta"), "classification"
    ),
    **dict.fromkeys(("beit", "deit", "swin", "swinv2", "vit"), "image_classification"),
    "blip-2": "image_text",
    "sam": "mask_generation",
    "sam_vision_model": "base",
    "whisper": "speech",
}

# Model types whose batches are not of tokens alone: `MODAL` in batch.py.
BATCHES_OF_THEIR_OWN = ("blip-2", "gemma3", "sam", "sam_vision_model", "whisper")

# How far the weights of models of images are moved from where they begin: tokens, position biases and linear biases
# begin at zero, where a wrong order does not show and SwinV2's cosines of zero vectors have noise for a gradient.
STIRRED = 0.1

# How far from zero matrices are that begin there, by model type, where that is not 0.02: what is projected by small
# weights, norms enlarge again, and with it each rounding.
BEGINS = {"gemma3": 0.2}

# Heads that no Auto class of transformers builds, by type and head: the class.
FURTHER_HEADS = {
    ("beit", "masked_image"): "BeitForMaskedImageModeling",
    ("blip-2", "image_embedding"): "Blip2VisionModelWithProjection",
    ("blip-2", "text_embedding"): "Blip2TextModelWithProjection",
    ("deit", "teacher"): "DeiTForImageClassificationWithTeacher",
    ("gpt2", "double"): "GPT2DoubleHeadsModel",
}

# Its weights begin so large that a small model's steps make much of their rounding.
_T5: dict[str, object] = {"initializer_factor": 0.5}

# A cache copies keys and values, and products of copies in another order of memory may be rounded otherwise; under a
# layout there is none.
UNCACHED: dict[str, object] = {"use_cache": False}

# Settings of the config that a model type needs besides the usual ones, which are in `ModelChoice.config`.
_PATCHES = {"image_size": [9, 15], "patch_size": 3, "encoder_stride": 3}
# Windows that do not fit, and odd heights and widths before they are halved.
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
# Of mixtures of experts and of attention with latent keys and values, by the names that configs have for them. A
# product of many experts at once needs rows of a multiple of 16 bytes, also of a rank's part.
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
# With small weights norms of a region's output divide by next to nothing and swell the rounding.
_STEADY: dict[str, object] = {"initializer_range": 0.2}
_GEMMA: dict[str, object] = {"sliding_window": 5, "final_logit_softcapping": 2.0, **_STEADY}
SETTINGS: dict[str, dict[str, object]] = {
    "afmoe": _STEADY,
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "kolibri1": _STEADY,
    "minimax_m2": _STEADY,
    "olmo3": _STEADY,
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "bloom": UNCACHED,
    "falcon": UNCACHED,
    # As many layers as there are by default; every other one sees the last tokens alone.
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5, **UNCACHED},
    "gptj": {"rotary_dim": 4, **UNCACHED},
    # Weights of the usual size are small beside a step, and norms of what is small enlarge each rounding of one.
    "glm4": {"initializer_range": 0.1},
    "opt": {"ffn_dim": 48, "init_std": 0.1},
    "albert": {
        "embedding_size": 24,
        "initializer_range": 0.1,
    },  # else its samples are alike behind the layers
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
    # Its norms stand behind the layers: what is small there brings its rounding with it.
    "swinv2": {**_WINDOWS, "initializer_range": 0.02, "layer_norm_eps": 0.1},
    "blip-2": {
        "text_config": {"model_type": "t5"},
        "num_query_tokens": NUM_QUERIES,
        "image_token_index": IMAGE_TOKEN,
        "image_text_hidden_size": 16,
    },
    "blip_2_vision_model": {"image_size": IMAGE_SIDE, "patch_size": 8, "initializer_range": 0.02},
    "gemma3": {
        # Layers that see all tokens and the last ones by turns.
        "text_config": {"sliding_window_pattern": 2},
        "mm_tokens_per_image": NUM_PATCHES,
        "image_token_index": IMAGE_TOKEN,
    },
    # Published models have no head on their vision model; of another width than the language model.
    "siglip_vision_model": {
        "image_size": IMAGE_SIDE,
        "patch_size": 8,
        "hidden_size": 48,
        "num_hidden_layers": 2,  # with four, the gradients of the first are further from exact than is allowed
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
    "whisper": {
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES,
        "max_target_positions": 16,
        "classifier_proj_size": 16,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}

# And what one of its heads needs: who rebuilds an image takes it to be square.
HEAD_SETTINGS: dict[tuple[str, str], dict[str, object]] = {
    ("albert", "pretraining"): {"num_labels": 2},
    ("vit", "masked_image"): {"image_size": 15},
    ("deit", "masked_image"): {"image_size": 15},
    ("beit", "masked_image"): {
        "use_mask_token": True,
        "use_relative_position_bias": False,
        "use_shared_relative_position_bias": True,
    },
    # Batch norms of more than a few numbers; older releases take the image to be square.
    ("beit", "segmentation"): {"image_size": 18, "pool_scales": [2, 3], "initializer_range": 0.2},
    ("swin", "masked_image"): {"image_size": 24},
    ("swinv2", "masked_image"): {"image_size": 24},
}


# The Auto class that builds each head; None where FURTHER_HEADS names the class.
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
        tied: a language-model head shares the embedding's weight.
        num_layers: the number of layers; of an encoder and a decoder each, where a model has both.
        settings: further settings of its config, as (name, value).
    """

    model_type: str
    head: str | None = None
    tied: bool = False
    num_layers: int = 4
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def head_name(self) -> str:
        """The head, the usual one where none was chosen."""
        return self.head or DEFAULT_HEAD.get(self.model_type, "causal")

    @property
    def described_head(self) -> str:
        """The head, and that it is tied where it is."""
        return f"{self.head_name}, tied" if self.tied else self.head_name

    @property
    def is_of_images(self) -> bool:
        """True if its input is images alone."""
        main_input = getattr(heads_of(self.model_type)[self.head_name], "main_input_name", "")
        return main_input == "pixel_values" and self.model_type not in BATCHES_OF_THEIR_OWN

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model type has an encoder and a decoder."""
        return bool(self.config().is_encoder_decoder)

    def errors(self) -> list[str]:
        """All that is wrong with it, each with what would work."""
        found = []
        if self.model_type not in transformers.CONFIG_MAPPING:
            found.append(
                f"model {self.model_type!r} is not a model type of transformers {transformers.__version__}"
            )
        if self.head_name not in HEADS:
            found.append(f"head {self.head_name!r} is unknown: use one of {', '.join(HEADS)}")
        if found:
            return found
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
        """Its config: small, without dropout."""
        blank = AutoConfig.for_model(self.model_type)
        chosen = self._chosen(self.model_type, blank, dict(self.settings))
        return AutoConfig.for_model(self.model_type, **chosen)

    def _chosen(
        self, model_type: str, blank: PretrainedConfig, own: Mapping[str, object]
    ) -> dict[str, object]:
        """The settings of a config, and of the configs inside it, that differ from transformers' own, in `blank`."""
        settings = self._wished()
        if hasattr(blank, "kv_lora_rank"):  # every head has keys and values of its own
            settings["num_key_value_heads"] = settings["num_attention_heads"]
        own = {
            **SETTINGS.get(model_type, {}),
            **HEAD_SETTINGS.get((model_type, self.head_name), {}),
            **own,
        }
        known = {
            blank.attribute_map.get(name, name): value  # older releases check some by their own names
            for name, value in settings.items()
            if name == "num_labels"
            or (
                hasattr(blank, name)
                and blank.attribute_map.get(name) not in own
                and not _is_derived(blank, name)
            )
        }
        if blank.is_encoder_decoder:
            known["decoder_start_token_id"] = 0
        dropouts = {
            name: 0.0 for name in vars(blank) if "drop" in name and isinstance(getattr(blank, name), float)
        }
        chosen = {
            **known,
            **dropouts,
            "classifier_dropout": 0.0,
            **own,
        }
        for name in blank.sub_configs:
            inner = getattr(blank, name) or blank.sub_configs[name]()
            given = cast(Mapping[str, Any], chosen.get(name, {}))
            # In older releases some have no type, and others one by which no config can be looked up.
            own_type = inner.model_type or f"{model_type}_{name.removesuffix('_config')}"
            inner_type = given.get("model_type", own_type)
            inner = type(inner)() if inner_type == own_type else AutoConfig.for_model(inner_type)
            chosen[name] = {**self._chosen(inner_type, inner, given), "model_type": inner_type}
        return chosen

    def _wished(self) -> dict[str, object]:
        """Settings of every config that has them."""
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
        """The model, in float32, equal for equal seeds, in training mode."""
        torch.manual_seed(seed)
        model = self._from_config().float()
        for parameter in model.parameters():
            if self.is_of_images:
                parameter.data += STIRRED * torch.randn_like(parameter)
            elif parameter.ndim > 1 and not parameter.any():  # as trained ones are not: some tables begin so
                nn.init.normal_(parameter, std=BEGINS.get(self.model_type, 0.02))
        return model.train()

    def build_on_meta(self) -> nn.Module:
        """The model without memory, for checks."""
        with torch.device("meta"):
            return self._from_config()

    def _from_config(self) -> nn.Module:
        model: Any = heads_of(self.model_type)[self.head_name](self.config())
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if not self.tied and head is not None and head.weight is embedding.weight:
            # T5 ties whatever its config says; T5 1.1 has weights of its own in the head all the same.
            head.weight = nn.Parameter(torch.randn_like(head.weight) * head.in_features**-0.5)
        return model


def _is_derived(config: PretrainedConfig, name: str) -> bool:
    """True if a setting follows from others and cannot be given."""
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def heads_of(model_type: str) -> dict[str, type[nn.Module]]:
    """The heads that transformers has for a model type, and the class of each; two may be one class."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    found = {}
    for head, auto in HEADS.items():
        mapping = {} if auto is None else getattr(transformers, auto)._model_mapping
        if config_class in mapping:
            classes = mapping[config_class]
            found[head] = classes[0] if isinstance(classes, tuple) else classes
        elif (model_type, head) in FURTHER_HEADS:
            found[head] = getattr(transformers, FURTHER_HEADS[model_type, head])
    return found
