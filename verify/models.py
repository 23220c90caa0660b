"""Small models of any type and head, built from their config. Their sizes are small.py, batches for them batch.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from .small import (
    BATCHES_OF_THEIR_OWN,
    BEGINS,
    DEFAULT_HEAD,
    END,
    EXPERTS,
    FURTHER_HEADS,
    HEAD_SETTINGS,
    SETTINGS,
    STIRRED,
    VOCABULARY,
)

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
        tied: whether a language-model head shares the embedding's weight.
        num_layers: how many layers; so many each of an encoder and of a decoder, where a model has both.
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
        """The head, and whether it is tied."""
        return f"{self.head_name}, tied" if self.tied else self.head_name

    @property
    def is_of_images(self) -> bool:
        """Whether its input is images alone."""
        main_input = getattr(heads_of(self.model_type)[self.head_name], "main_input_name", "")
        return main_input == "pixel_values" and self.model_type not in BATCHES_OF_THEIR_OWN

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model type has an encoder and a decoder."""
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
        """What every config is given, as far as it knows it."""
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
    """Whether a setting follows from others and cannot be given."""
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
