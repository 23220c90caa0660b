"""Images and videos of a batch of texts, which have no row per sample: microbatches get those of their texts.

Processors of vision-language models put all images of a batch one after the other, as patches (Qwen2-VL: `pixel_values`
of (patches, values) with `image_grid_thw` of (images, 3)) or tiles (InternVL: (tiles, channels, height, width)). Whose
they are, the placeholder tokens of the texts say: patches and tiles of a batch have equally many tokens.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

Rows = Mapping[str, Sequence[int]]  # tensor -> where the rows of each sample begin, and the end of the last

# Kind of input -> its tensor of patches or tiles, the grids of its images, and the config's names of its token.
_KINDS = {
    "image": (
        "pixel_values",
        ("image_grid_thw", "image_grid_hws", "image_grid_hw"),
        ("image_token_id", "image_token_index"),
    ),
    "video": ("pixel_values_videos", ("video_grid_thw",), ("video_token_id", "video_token_index")),
}
# What the names of further inputs of a kind begin with, or contain.
_OF_IMAGES, _OF_VIDEOS = ("pixel_", "image_", "num_local_patches"), ("video", "second_per_grid")
_TEXTS = "input_ids"


def _kind_of(name: str) -> str | None:
    """Return "image" or "video" for a tensor of images or videos beside texts, by its name; None for other tensors."""
    if any(word in name for word in _OF_VIDEOS):
        return "video"
    return "image" if name.startswith(_OF_IMAGES) else None


def counts_samples(batch: Any, path: str) -> bool:
    """Return True if a tensor of a batch surely has a row per sample; False for images and videos beside texts."""
    return not (isinstance(batch, Mapping) and _TEXTS in batch and _kind_of(path) is not None)


def image_rows(batch: Any, config: Any) -> Rows:
    """Return the rows of each sample in the tensors of images and videos that do not have a row per sample.

    Reads the batch on the host.

    Args:
        batch: the inputs of a model, on the CPU if no stream should wait.
        config: the model's config, with the ids of placeholder tokens.

    Raises:
        ValueError: the placeholder tokens of a sample are no whole number of its images.
    """
    rows: dict[str, Sequence[int]] = {}
    if not isinstance(batch, Mapping) or not isinstance(texts := batch.get(_TEXTS), Tensor):
        return rows
    for kind, (pixels, grid_names, token_names) in _KINDS.items():
        tensors = {
            name: tensor
            for name, tensor in batch.items()
            if _kind_of(name) == kind and isinstance(tensor, Tensor) and tensor.dim()
        }
        grid = next((tensors[name] for name in grid_names if name in tensors), None)
        if grid is None and all(len(tensor) == len(texts) for tensor in tensors.values()):
            continue  # a row per sample
        ids = (getattr(config, name, None) for name in token_names)
        token = next((id_ for id_ in ids if id_ is not None), None)
        num_tokens = [0] * len(texts) if token is None else (texts == token).sum(1).tolist()
        num_patches = [1] * len(tensors.get(pixels, ())) if grid is None else grid.prod(1).tolist()
        starts = _starts(num_tokens, num_patches)
        if any(len(tensor) not in starts for tensor in tensors.values()):
            described = ", ".join(f"{name} has {len(tensor)}" for name, tensor in tensors.items())
            raise ValueError(
                f"{kind}s cannot be assigned to the {len(texts)} samples of a batch by their rows: {described}; "
                f"{_TEXTS} has {', '.join(map(str, num_tokens))} tokens of {token_names[0]}={token}. Give the {kind}s "
                "of all samples in their order, or one row for each sample"
            )
        rows |= {name: starts[len(tensor)] for name, tensor in tensors.items()}
    return rows


def _starts(num_tokens: Sequence[int], num_patches: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows where samples begin, for tensors of patches and for tensors of images.

    Args:
        num_tokens: placeholder tokens of each sample, all of equally many patches.
        num_patches: patches of each image.

    Returns:
        By the number of rows of a tensor (all patches, or all images): the first row of each sample, and the end of the
        last one. An empty dict if a sample would begin within a patch or an image.
    """
    first_image_at = {patch: image for image, patch in enumerate(accumulate(num_patches, initial=0))}
    all_tokens, all_patches = sum(num_tokens), sum(num_patches)
    if all_tokens == 0:
        return {}
    scaled = [tokens_before * all_patches for tokens_before in accumulate(num_tokens, initial=0)]
    starts = [product // all_tokens for product in scaled]
    if any(product % all_tokens for product in scaled) or not first_image_at.keys() >= set(starts):
        return {}
    return {all_patches: starts, len(num_patches): [first_image_at[start] for start in starts]}
