"""Batches of the parity check: token ids, images, and inputs of multimodal models."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from ..pipeline.image_rows import image_rows
from ..pipeline.microbatch import split
from .model_choice import (
    END,
    FRAMES,
    IMAGE_SIDE,
    IMAGE_TOKEN,
    LENGTH,
    MELS,
    NUM_PATCHES,
    NUM_QUERIES,
    TARGET_LENGTH,
    VOCABULARY,
    ModelChoice,
)

# B batch, S sequence, P positions of an audio input
Batch = dict[str, Tensor]


def classified_image(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return images (B, channels, height, width) of the config's size, and further inputs of the head."""
    config = choice.config()
    height, width = _pair(config.image_size)
    patch_height, patch_width = _pair(config.patch_size)
    pixels = torch.randn(num_samples, config.num_channels, height, width, generator=generator)
    patches = (height // patch_height) * (width // patch_width)
    hidden = torch.rand(num_samples, patches, generator=generator) < 0.4
    inputs: dict[str, Batch] = {
        "image_classification": {"labels": torch.randint(0, 3, (num_samples,), generator=generator)},
        "masked_image": {"bool_masked_pos": hidden},
        "segmentation": {"labels": torch.randint(0, 3, (num_samples, height, width), generator=generator)},
    }
    return {"pixel_values": pixels, **inputs.get(choice.head_name, {})}


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def microbatches_of(batch: Mapping[str, Any], number: int, config: Any) -> list[dict[str, Any]]:
    """Split a batch as `execute_pipeline` does.

    Args:
        batch: as of `make_batch`.
        number: number of the parts.
        config: the model's config, by which images belong to texts; None for a model without one.
    """
    rows = image_rows(batch, config)
    microbatches: list[dict[str, Any]] = split(
        batch, num_microbatches=number, microbatch_size=None, rows=rows
    )
    return microbatches


def make_batch(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return a batch for the model's head: images, audio, or text of (num_samples, LENGTH) tokens with padded rows.

    The decoder of an encoder-decoder model gets (num_samples, TARGET_LENGTH), padded too.
    """
    if choice.is_generic:
        return choice.copy().inputs.make(num_samples, seed)
    generator = torch.Generator().manual_seed(seed)
    if choice.model_type in MODAL:
        return MODAL[choice.model_type](choice, num_samples, generator)
    if choice.is_of_images:
        return classified_image(choice, num_samples, generator)
    return _text(choice, num_samples, generator)


def _text(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return text for the model's head."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lead = (num_samples, 3) if choice.head_name in ("choice", "double") else (num_samples,)
    ids = integers(3, VOCABULARY, *lead, LENGTH)
    lengths = integers(LENGTH // 2, LENGTH + 1, *lead)
    lengths.view(-1)[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(-1)).long()
    ids = ids.masked_fill(mask == 0, 0)
    tokens = integers(3, VOCABULARY, *lead, LENGTH).masked_fill(mask == 0, -100)
    labels: dict[str, dict[str, Tensor]] = {
        "causal": {"labels": ids.masked_fill(mask == 0, -100)},
        "image_text": {"labels": ids.masked_fill(mask == 0, -100)},  # text alone
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
        # Such a head reads the state of the last end-of-sequence token of each row.
        ids = ids.scatter(-1, lengths.unsqueeze(-1) - 1, END)
    # Heads of pretraining with another loss besides the next token.
    follows = integers(0, 2, num_samples)
    pretraining = {
        "albert": {"labels": tokens, "sentence_order_label": follows},
        "bert": {"labels": tokens, "next_sentence_label": follows},
        "electra": {"labels": tokens % 2},
        "ernie": {"labels": tokens, "next_sentence_label": follows},
    }
    if choice.head_name == "pretraining":
        labels["pretraining"] |= pretraining.get(choice.model_type, {})
    if choice.head_name == "double":  # the next token, and the right choice
        labels["double"] = labels["causal"] | {
            "mc_token_ids": lengths - 1,
            "mc_labels": integers(0, 3, num_samples),
        }
    return {"input_ids": ids, "attention_mask": mask, **labels[choice.head_name]}


def loss_of(outputs: object, inputs: object) -> Tensor:
    """Return the model's own loss, or the sum of two heads'; without a loss, a fixed weighted sum of its outputs.

    Hidden states of images are left out, since a pipeline's last stage lacks them; other outputs depend on them. So are
    outputs without gradients beside others, such as a mask that was drawn on the first stage: None on the last one.
    """
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        second = getattr(outputs, "mc_loss", None)
        return loss if second is None else loss + second
    if isinstance(outputs, Mapping):
        values = [value for name, value in outputs.items() if name != "image_hidden_states"]
    else:
        values = list(outputs)  # type: ignore[call-overload]
    flat = [entry for value in values for entry in (value if isinstance(value, (tuple, list)) else (value,))]
    tensors = [entry for entry in flat if isinstance(entry, Tensor)]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    return torch.stack([_weighted(tensor) for tensor in trained or tensors]).sum()


def _weighted(output: Tensor) -> Tensor:
    """Return the mean of an output with fixed weights, so that a norm does not make it constant."""
    flat = output.float().reshape(*output.shape[:1], -1)  # also of one number, or of one for each sample
    weights = torch.arange(flat.shape[-1], device=output.device, dtype=torch.float32).cos()
    return (flat * weights).mean()


def _tokens(num_samples: int, length: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return tokens (B, S) without the image token, rows padded to different lengths, and the mask."""
    tokens = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (num_samples, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (num_samples, 1), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return tokens.masked_fill(mask == 0, 0), mask


def speech(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return audio features (B, MELS, 2 P), with text if the head has a decoder. A decoder alone gets hidden states."""
    features = torch.randn(num_samples, MELS, 2 * FRAMES, generator=generator)
    tokens, mask = _tokens(num_samples, TARGET_LENGTH, generator)
    labels = tokens.masked_fill(mask == 0, -100)
    classes = torch.randint(0, 3, (num_samples,), generator=generator)
    states = torch.randn(num_samples, FRAMES, choice.config().hidden_size, generator=generator)
    heads: dict[str, Batch] = {
        "speech": {"input_features": features, "labels": labels},
        "audio_classification": {"input_features": features, "labels": classes},
        "base": {
            "input_features": features,
            "decoder_input_ids": tokens,
            "decoder_attention_mask": mask,
        },
        "causal": {
            "input_ids": tokens,
            "attention_mask": mask,
            "encoder_outputs": states,
            "labels": labels,
        },
    }
    return heads[choice.head_name]


def image(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return images (B, 3, IMAGE_SIDE, IMAGE_SIDE)."""
    return {"pixel_values": torch.randn(num_samples, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator)}


def prompted_image(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return images with two sets of three points and a box each, and a mask."""
    points = IMAGE_SIDE * torch.rand(num_samples, 2, 3, 2, generator=generator)
    boxes = IMAGE_SIDE * torch.rand(num_samples, 2, 4, generator=generator)
    return {
        **image(choice, num_samples, generator),
        "input_points": points,
        "input_labels": torch.randint(-1, 2, (num_samples, 2, 3), generator=generator),
        "input_boxes": boxes,
        "input_masks": torch.randn(num_samples, 1, IMAGE_SIDE, IMAGE_SIDE, generator=generator),
    }


def image_text(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return images with text that starts with image tokens, and the labels of a language model; or one of both."""
    if choice.head_name == "image_embedding":
        return image(choice, num_samples, generator)
    tokens, mask = _tokens(num_samples, LENGTH, generator)
    if choice.head_name == "text_embedding":
        return {"input_ids": tokens, "attention_mask": mask}
    targets, target_mask = _tokens(num_samples, TARGET_LENGTH, generator)
    places = torch.full((num_samples, NUM_QUERIES), IMAGE_TOKEN)
    if choice.is_encoder_decoder:
        labels = targets.masked_fill(target_mask == 0, -100)
    else:
        labels = torch.cat([torch.full_like(places, -100), tokens.masked_fill(mask == 0, -100)], 1)
    batch = {
        **image(choice, num_samples, generator),
        "input_ids": torch.cat([places, tokens], 1),
        "attention_mask": torch.cat([torch.ones_like(places), mask], 1),
    }
    return batch if choice.head_name == "zero_shot_image" else batch | {"labels": labels}


def image_and_text(choice: ModelChoice, num_samples: int, generator: Generator) -> dict[str, Any]:
    """Return images with a text each, whose loss tells the pairs from all others."""
    tokens, mask = _tokens(num_samples, LENGTH, generator)
    texts = {"input_ids": tokens, "attention_mask": mask}
    return {**image(choice, num_samples, generator), **texts, "return_loss": True}


def sound(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return sounds (B, 40 FRAMES) with texts, which have fewer tokens than the sound has positions."""
    tokens, mask = _tokens(num_samples, FRAMES // 2, generator)
    sounds = torch.randn(num_samples, 40 * FRAMES, generator=generator)
    return {"input_values": sounds, "labels": tokens.masked_fill(mask == 0, -100)}


def image_in_text(choice: ModelChoice, num_samples: int, generator: Generator) -> Batch:
    """Return text with image tokens in its middle, marked in `token_type_ids`; they attend to each other."""
    before = LENGTH // 4
    tokens, mask = _tokens(num_samples, LENGTH, generator)
    places = torch.full((num_samples, NUM_PATCHES), IMAGE_TOKEN)

    def around(text: Tensor, of_image: Tensor) -> Tensor:
        return torch.cat([text[:, :before], of_image, text[:, before:]], 1)

    labels = {
        "causal": around(tokens.masked_fill(mask == 0, -100), torch.full_like(places, -100)),
        "classification": torch.randint(0, 3, (num_samples,), generator=generator),
    }
    batch = {
        **image(choice, num_samples, generator),
        "input_ids": around(tokens, places),
        "attention_mask": around(mask, torch.ones_like(places)),
        "token_type_ids": around(torch.zeros_like(tokens), torch.ones_like(places)),
    }
    return batch | {"labels": labels[choice.head_name]} if choice.head_name in labels else batch


# By model type.
MODAL: dict[str, Callable[[ModelChoice, int, Generator], dict[str, Any]]] = {
    "blip-2": image_text,
    "clip": image_and_text,
    "gemma3": image_in_text,
    "sam": prompted_image,
    "sam_vision_model": image,
    "siglip": image_and_text,
    "wav2vec2": sound,
    "whisper": speech,
}
