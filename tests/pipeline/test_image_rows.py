"""Images of a batch of texts go to the microbatches of their texts."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from echelon.pipeline.image_rows import image_rows
from echelon.pipeline.microbatch import batch_size, split

CONFIG = SimpleNamespace(image_token_id=7, video_token_id=8)


def texts(*counts: int, token: int = 7) -> Tensor:
    """Make texts of nine tokens with this many placeholders."""
    return torch.stack([torch.tensor([token] * count + [1] * (9 - count)) for count in counts])


def numbered(count: int) -> Tensor:
    return torch.arange(float(count)).view(count, 1)


def rows_of(name: str, batch: dict[str, Any], num_microbatches: int) -> list[list[int] | None]:
    """Return the rows of a tensor in each microbatch."""
    assert batch_size(batch) == len(batch["input_ids"])
    cut = split(
        batch, num_microbatches=num_microbatches, microbatch_size=None, rows=image_rows(batch, CONFIG)
    )
    return [None if microbatch[name] is None else microbatch[name].flatten().tolist() for microbatch in cut]


def test_patches_and_grids_go_with_the_tokens_of_their_images() -> None:
    grid = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 4, 4]])  # patches; a token for four of them
    batch = {"input_ids": texts(3, 0, 4), "pixel_values": numbered(28), "image_grid_thw": grid}
    assert rows_of("pixel_values", batch, 3) == [list(range(12)), None, list(range(12, 28))]
    assert rows_of("image_grid_thw", batch, 3) == [[1, 2, 4, 1, 2, 2], None, [1, 4, 4]]
    assert rows_of("pixel_values", batch, 1) == [list(range(28))]


def test_videos_have_tokens_of_their_own() -> None:
    ids = texts(2, 1)
    ids[1, 5:7] = 8
    batch = {
        "input_ids": ids,
        "pixel_values": numbered(12),
        "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2]]),
        "pixel_values_videos": numbered(8),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
        "second_per_grid_ts": torch.tensor([0.5]),
    }
    assert rows_of("pixel_values", batch, 2) == [list(range(8)), list(range(8, 12))]
    assert rows_of("pixel_values_videos", batch, 2) == [None, list(range(8))]
    assert rows_of("second_per_grid_ts", batch, 2) == [None, [0.5]]


def test_tiles_without_a_grid_have_equally_many_tokens() -> None:
    batch = {"input_ids": texts(2, 6, 0), "pixel_values": numbered(4), "image_sizes": numbered(4)}
    assert rows_of("pixel_values", batch, 3) == [[0], [1, 2, 3], None]
    assert rows_of("image_sizes", batch, 3) == [[0], [1, 2, 3], None]


def test_a_row_per_sample_stays_so() -> None:
    batch = {"input_ids": texts(0, 9, 3), "pixel_values": numbered(3)}  # whatever the tokens are
    assert rows_of("pixel_values", batch, 3) == [[0], [1], [2]]
    assert rows_of("input_ids", batch, 1) == [batch["input_ids"].flatten().tolist()]
