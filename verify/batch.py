"""Batches for small models of any type and head, and a loss for each. The models are models.py.

Text is here, other inputs are in modal_batch.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .images import make_images
from .modal_batch import MODAL
from .models import ModelChoice
from .small import END, LENGTH, TARGET_LENGTH, VOCABULARY


def make_batch(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Tensor]:
    """A batch for the model's head: images, sounds, or text of (num_samples, LENGTH) tokens, rows padded to lengths.

    A decoder beside an encoder gets (num_samples, TARGET_LENGTH), padded too.
    """
    drawn = torch.Generator().manual_seed(seed)
    if choice.model_type in MODAL:
        return MODAL[choice.model_type](choice, num_samples, drawn)
    if choice.is_of_images:
        return make_images(choice.config(), choice.head_name, num_samples=num_samples, drawn=drawn)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=drawn)

    lead = (num_samples, 3) if choice.head_name in ("choice", "double") else (num_samples,)
    ids = integers(3, VOCABULARY, *lead, LENGTH)
    lengths = integers(LENGTH // 2, LENGTH + 1, *lead)
    lengths.view(-1)[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(-1)).long()
    ids = ids.masked_fill(mask == 0, 0)
    tokens = integers(3, VOCABULARY, *lead, LENGTH).masked_fill(mask == 0, -100)
    labels: dict[str, dict[str, Tensor]] = {
        "causal": {"labels": ids.masked_fill(mask == 0, -100)},
        "masked": {"labels": tokens},
        "pretraining": {"labels": ids.masked_fill(mask == 0, -100)},
        "classification": {"labels": integers(0, 3, num_samples)},
        "token": {"labels": (tokens % 3).masked_fill(mask == 0, -100)},
        "question": {
            "start_positions": integers(0, 5, num_samples),
            "end_positions": integers(5, 9, num_samples),
        },
        "choice": {"labels": integers(0, 3, num_samples)},
        "next_sentence": {"labels": integers(0, 2, num_samples)},
        "base": {},
        "text_encoding": {},
    }
    lasting = torch.arange(TARGET_LENGTH) < integers(TARGET_LENGTH // 2, TARGET_LENGTH + 1, num_samples, 1)
    targets = integers(3, VOCABULARY, num_samples, TARGET_LENGTH)
    labels["seq2seq"] = {"labels": targets.masked_fill(~lasting, -100)}
    if choice.is_encoder_decoder:
        labels["base"] = {"decoder_input_ids": targets.masked_fill(~lasting, 0)}
        # Such a head reads the state of each row's last end of sequence.
        ids = ids.scatter(-1, lengths.unsqueeze(-1) - 1, END)
    # Those that pretrain with more than the next token.
    follows = integers(0, 2, num_samples)
    pretraining = {
        "albert": {"labels": tokens, "sentence_order_label": follows},
        "bert": {"labels": tokens, "next_sentence_label": follows},
        "electra": {"labels": tokens % 2},
        "ernie": {"labels": tokens, "next_sentence_label": follows},
    }
    if choice.head_name == "pretraining":
        labels["pretraining"] |= pretraining.get(choice.model_type, {})
    if choice.head_name == "double":  # the next token, and which choice is right
        labels["double"] = labels["causal"] | {
            "mc_token_ids": lengths - 1,
            "mc_labels": integers(0, 3, num_samples),
        }
    return {"input_ids": ids, "attention_mask": mask, **labels[choice.head_name]}


def loss_of(outputs: object, inputs: object) -> Tensor:
    """The model's own loss, or both of two heads; where it has none a fixed weighted sum of its outputs.

    Not of the states of images, which a pipeline's last stage has not: what they become is in the others.
    """
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        second = getattr(outputs, "mc_loss", None)
        return loss if second is None else loss + second
    if isinstance(outputs, Mapping):
        values = [value for name, value in outputs.items() if name != "image_hidden_states"]
    else:
        values = list(outputs)  # type: ignore[call-overload]
    found = [each for value in values for each in (value if isinstance(value, (tuple, list)) else (value,))]
    return torch.stack([_weighted(each) for each in found if isinstance(each, Tensor)]).sum()


def _weighted(output: Tensor) -> Tensor:
    """The mean of an output by weights that no norm of it makes a constant."""
    flat = output.float().flatten(1)
    weights = torch.arange(flat.shape[-1], device=output.device, dtype=torch.float32).cos()
    return (flat * weights).mean()
