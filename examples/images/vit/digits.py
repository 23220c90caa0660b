"""Handwritten digits for the ViT example: the 1,797 images of 8×8 pixels that scikit-learn brings along."""

# N samples, C channels, P pixels of a side

import importlib.util

import torch
from torch import Tensor
from torch.nn.functional import interpolate

NUM_CLASSES = 10
SIDE = 8  # pixels
NUM_TEST = 360
HIGHEST_VALUE = 16.0  # of a pixel; the lowest is 0

Sample = dict[str, Tensor]


def errors() -> list[str]:
    """Why there are no digits: scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is not None:
        return []
    return ["the digits come with scikit-learn, which is not installed: pip install scikit-learn"]


def splits(*, side: int = SIDE, num_channels: int = 1) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on and NUM_TEST others to test with, the same ones whatever a run is seeded with.

    Args:
        side: pixels; images are scaled to it.
        num_channels: all of them equal.

    Returns:
        Dicts of pixel_values (C, P, P), from −1 to 1, and of labels.
    """
    from sklearn.datasets import load_digits  # optional: this example alone needs it

    found = load_digits()
    images_NCPP = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / (HIGHEST_VALUE / 2) - 1
    if side != SIDE:
        images_NCPP = interpolate(images_NCPP, size=(side, side), mode="bilinear")
    images_NCPP = images_NCPP.expand(-1, num_channels, -1, -1)
    labels = torch.tensor(found.target)
    # Mixed, as the last images in the file are by other writers than the first ones.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [{"pixel_values": images_NCPP[row], "labels": labels[row]} for row in order]
    return samples[NUM_TEST:], samples[:NUM_TEST]
