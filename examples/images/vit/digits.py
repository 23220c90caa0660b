"""Handwritten digits for the ViT example: the 1,797 images of 8×8 pixels that come with scikit-learn."""

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
    """Return an error if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is not None:
        return []
    return ["the digits come with scikit-learn, which is not installed: pip install scikit-learn"]


def splits(*, side: int = SIDE, num_channels: int = 1) -> tuple[list[Sample], list[Sample]]:
    """Return the training samples and NUM_TEST test samples, the same for every seed.

    Args:
        side: pixels of a side, to which images are scaled.
        num_channels: number of channels, all equal.

    Returns:
        Dicts of pixel_values (C, P, P), from −1 to 1, and labels.
    """
    from sklearn.datasets import load_digits  # optional: only this example needs it

    found = load_digits()
    images_NCPP = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / (HIGHEST_VALUE / 2) - 1
    if side != SIDE:
        images_NCPP = interpolate(images_NCPP, size=(side, side), mode="bilinear")
    images_NCPP = images_NCPP.expand(-1, num_channels, -1, -1)
    labels = torch.tensor(found.target)
    # Shuffled, since the last images in the file are by other writers than the first ones.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [{"pixel_values": images_NCPP[row], "labels": labels[row]} for row in order]
    return samples[NUM_TEST:], samples[:NUM_TEST]
