"""Batches of images for small models of any head. Batches of text are batch.py."""

import torch
from torch import Tensor
from transformers import PretrainedConfig


def make_images(
    config: PretrainedConfig, head: str, *, num_samples: int, drawn: torch.Generator
) -> dict[str, Tensor]:
    """A batch for the head: (num_samples, channels, height, width) pixels of the config's size.

    Args:
        config: has `image_size` and `patch_size`, each a number or (height, width).
        head: a key of `models.HEADS`.
        num_samples: how many images.
        drawn: what all numbers are drawn from.
    """
    height, width = _pair(config.image_size)
    patch_height, patch_width = _pair(config.patch_size)
    pixels = torch.randn(num_samples, config.num_channels, height, width, generator=drawn)
    patches = (height // patch_height) * (width // patch_width)
    hidden = torch.rand(num_samples, patches, generator=drawn) < 0.4
    inputs: dict[str, dict[str, Tensor]] = {
        "image_classification": {"labels": torch.randint(0, 3, (num_samples,), generator=drawn)},
        "masked_image": {"bool_masked_pos": hidden},
        "segmentation": {"labels": torch.randint(0, 3, (num_samples, height, width), generator=drawn)},
    }
    return {"pixel_values": pixels, **inputs.get(head, {})}


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
