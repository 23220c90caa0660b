"""Batches for models that take more than text: sound, images with prompts, images with text."""

# B batch, S sequence, P positions of a sound, G images' side in patches

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from .models import ModelChoice
from .small import (
    FRAMES,
    IMAGE_SIDE,
    IMAGE_TOKEN,
    LENGTH,
    MELS,
    NUM_PATCHES,
    NUM_QUERIES,
    TARGET_LENGTH,
    VOCABULARY,
)

Batch = dict[str, Tensor]


def _tokens(num_samples: int, length: int, drawn: Generator) -> tuple[Tensor, Tensor]:
    """(B, S) of tokens other than the image's, rows padded to different lengths, and the mask."""
    tokens = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (num_samples, length), generator=drawn)
    lengths = torch.randint(length // 2, length + 1, (num_samples, 1), generator=drawn)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return tokens.masked_fill(mask == 0, 0), mask


def speech(choice: ModelChoice, num_samples: int, drawn: Generator) -> Batch:
    """Features (B, MELS, 2 P) of a sound, and text where the head has a decoder; to a decoder alone, states."""
    features = torch.randn(num_samples, MELS, 2 * FRAMES, generator=drawn)
    tokens, mask = _tokens(num_samples, TARGET_LENGTH, drawn)
    labels = tokens.masked_fill(mask == 0, -100)
    classes = torch.randint(0, 3, (num_samples,), generator=drawn)
    states = torch.randn(num_samples, FRAMES, choice.config().hidden_size, generator=drawn)
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


def image(choice: ModelChoice, num_samples: int, drawn: Generator) -> Batch:
    """Images (B, 3, IMAGE_SIDE, IMAGE_SIDE)."""
    return {"pixel_values": torch.randn(num_samples, 3, IMAGE_SIDE, IMAGE_SIDE, generator=drawn)}


def prompted_image(choice: ModelChoice, num_samples: int, drawn: Generator) -> Batch:
    """Images with two sets each of three points and a box, and a mask."""
    points = IMAGE_SIDE * torch.rand(num_samples, 2, 3, 2, generator=drawn)
    boxes = IMAGE_SIDE * torch.rand(num_samples, 2, 4, generator=drawn)
    return {
        **image(choice, num_samples, drawn),
        "input_points": points,
        "input_labels": torch.randint(-1, 2, (num_samples, 2, 3), generator=drawn),
        "input_boxes": boxes,
        "input_masks": torch.randn(num_samples, 1, IMAGE_SIDE, IMAGE_SIDE, generator=drawn),
    }


def image_text(choice: ModelChoice, num_samples: int, drawn: Generator) -> Batch:
    """Images with text that begins with their places in it, what a language model is to say of both; or one alone."""
    if choice.head_name == "image_embedding":
        return image(choice, num_samples, drawn)
    tokens, mask = _tokens(num_samples, LENGTH, drawn)
    if choice.head_name == "text_embedding":
        return {"input_ids": tokens, "attention_mask": mask}
    targets, target_mask = _tokens(num_samples, TARGET_LENGTH, drawn)
    places = torch.full((num_samples, NUM_QUERIES), IMAGE_TOKEN)
    labels = {
        True: targets.masked_fill(target_mask == 0, -100),
        False: torch.cat([torch.full_like(places, -100), tokens.masked_fill(mask == 0, -100)], 1),
    }
    own: Batch = {"labels": labels[choice.is_encoder_decoder]}
    return {
        **image(choice, num_samples, drawn),
        "input_ids": torch.cat([places, tokens], 1),
        "attention_mask": torch.cat([torch.ones_like(places), mask], 1),
        **(own if choice.head_name != "zero_shot_image" else {}),
    }


def image_in_text(choice: ModelChoice, num_samples: int, drawn: Generator) -> Batch:
    """Text with the places of an image in its middle, which `token_type_ids` tells: they attend to each other."""
    before = LENGTH // 4
    tokens, mask = _tokens(num_samples, LENGTH, drawn)
    places = torch.full((num_samples, NUM_PATCHES), IMAGE_TOKEN)

    def around(text: Tensor, of_image: Tensor) -> Tensor:
        return torch.cat([text[:, :before], of_image, text[:, before:]], 1)

    labels = {
        "causal": around(tokens.masked_fill(mask == 0, -100), torch.full_like(places, -100)),
        "classification": torch.randint(0, 3, (num_samples,), generator=drawn),
    }
    own = {"labels": labels[choice.head_name]} if choice.head_name in labels else {}
    return {
        **image(choice, num_samples, drawn),
        "input_ids": around(tokens, places),
        "attention_mask": around(mask, torch.ones_like(places)),
        "token_type_ids": around(torch.zeros_like(tokens), torch.ones_like(places)),
        **own,
    }


# By model type.
MODAL: dict[str, Callable[[ModelChoice, int, Generator], Batch]] = {
    "blip-2": image_text,
    "gemma3": image_in_text,
    "sam": prompted_image,
    "sam_vision_model": image,
    "whisper": speech,
}
