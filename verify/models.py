"""Small models of any type and head, built from their config, and batches for them."""

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

# Odd and unequal sizes on purpose: a vocabulary that no number of ranks divides, padded rows of all lengths.
VOCABULARY = 101
LENGTH = 13
TARGET_LENGTH = 9  # of what a decoder beside an encoder reads and predicts
END = 2  # the token that ends a sequence

HEADS = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "classification": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "question": "AutoModelForQuestionAnswering",
    "choice": "AutoModelForMultipleChoice",
    "next_sentence": "AutoModelForNextSentencePrediction",
    "base": "AutoModel",
}
DEFAULT_HEAD = {"bert": "classification", "t5": "seq2seq", "mt5": "seq2seq", "umt5": "seq2seq"}


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
    def is_encoder_decoder(self) -> bool:
        """Whether the model type has an encoder and a decoder."""
        return bool(AutoConfig.for_model(self.model_type).is_encoder_decoder)

    def faults(self) -> list[str]:
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
        config_class = transformers.CONFIG_MAPPING[self.model_type]
        heads = [
            head for head, auto in HEADS.items() if config_class in getattr(transformers, auto)._model_mapping
        ]
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
        settings: dict[str, object] = dict(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=self.num_layers,
            num_decoder_layers=self.num_layers,
            num_attention_heads=4,
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
        )
        blank = AutoConfig.for_model(self.model_type)
        known = {
            name: value for name, value in settings.items() if hasattr(blank, name) or name == "num_labels"
        }
        if self.is_encoder_decoder:
            known["decoder_start_token_id"] = 0
        dropouts = {
            name: 0.0 for name in vars(blank) if "drop" in name and isinstance(getattr(blank, name), float)
        }
        chosen = {**known, **dropouts, "classifier_dropout": 0.0, **dict(self.settings)}
        return AutoConfig.for_model(self.model_type, **chosen)

    def build(self, seed: int = 0) -> nn.Module:
        """The model, in float32, equal for equal seeds, in training mode."""
        torch.manual_seed(seed)
        return self._from_config().float().train()

    def build_on_meta(self) -> nn.Module:
        """The model without memory, for checks."""
        with torch.device("meta"):
            return self._from_config()

    def _from_config(self) -> nn.Module:
        model = getattr(transformers, HEADS[self.head_name]).from_config(self.config())
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if not self.tied and head is not None and head.weight is embedding.weight:
            # T5 ties whatever its config says; T5 1.1 has weights of its own in the head all the same.
            head.weight = nn.Parameter(torch.randn_like(head.weight) * head.in_features**-0.5)
        return model


def make_batch(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Tensor]:
    """A batch of text for the model's head: (num_samples, LENGTH) tokens, rows padded to different lengths.

    A decoder beside an encoder gets (num_samples, TARGET_LENGTH), padded too.
    """
    drawn = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=drawn)

    lead = (num_samples, 3) if choice.head_name == "choice" else (num_samples,)
    ids = integers(3, VOCABULARY, *lead, LENGTH)
    lengths = integers(LENGTH // 2, LENGTH + 1, *lead)
    lengths.view(-1)[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(-1)).long()
    ids = ids.masked_fill(mask == 0, 0)
    tokens = integers(3, VOCABULARY, *lead, LENGTH).masked_fill(mask == 0, -100)
    labels: dict[str, dict[str, Tensor]] = {
        "causal": {"labels": ids.masked_fill(mask == 0, -100)},
        "masked": {"labels": tokens},
        "pretraining": {"labels": tokens, "next_sentence_label": integers(0, 2, num_samples)},
        "classification": {"labels": integers(0, 3, num_samples)},
        "token": {"labels": (tokens % 3).masked_fill(mask == 0, -100)},
        "question": {
            "start_positions": integers(0, 5, num_samples),
            "end_positions": integers(5, 9, num_samples),
        },
        "choice": {"labels": integers(0, 3, num_samples)},
        "next_sentence": {"labels": integers(0, 2, num_samples)},
        "base": {},
    }
    lasting = torch.arange(TARGET_LENGTH) < integers(TARGET_LENGTH // 2, TARGET_LENGTH + 1, num_samples, 1)
    targets = integers(3, VOCABULARY, num_samples, TARGET_LENGTH)
    labels["seq2seq"] = {"labels": targets.masked_fill(~lasting, -100)}
    if choice.is_encoder_decoder:
        labels["base"] = {"decoder_input_ids": targets.masked_fill(~lasting, 0)}
        # Such a head reads the state of each row's last end of sequence.
        ids = ids.scatter(-1, lengths.unsqueeze(-1) - 1, END)
    own = labels[choice.head_name]
    if choice.head_name == "pretraining" and choice.model_type != "bert":
        own = {"labels": ids.masked_fill(mask == 0, -100)}
    return {"input_ids": ids, "attention_mask": mask, **own}


def loss_of(outputs: object, inputs: object) -> Tensor:
    """The model's own loss, or where it has none a fixed weighted sum of its first output."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first = outputs[0]  # type: ignore[index]
    weights = torch.linspace(-1.0, 1.0, first.shape[-1], device=first.device, dtype=torch.float32)
    return (first.float() * weights).mean()
