"""Blocks of masks, without processes. test_parallel_attention.py compares them with the full mask."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as masks

from echelon.shardformer.sequence.block_mask import BlockKind, BlockMask, TensorMask, block_mask

from .masks import KINDS, full_mask, in_blocks, registered

LENGTH = 13


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_a_tensor_only_if_needed(kind: str) -> None:
    mask, expected = in_blocks(kind, LENGTH), full_mask(kind, LENGTH)
    for queries in (range(4), range(4, 8), range(2, 7), range(6, 7)):
        for keys in (range(4), range(12, 13), range(2, 7), range(LENGTH)):
            block = expected[:, :, queries.start : queries.stop, keys.start : keys.stop]
            seen = mask.block(queries, keys)
            is_mixed = bool(block.any() and not block.all())
            assert isinstance(seen, Tensor) == (is_mixed and seen is not BlockKind.TRIANGLE)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (masks.causal_mask_function, {}),
        (masks.sliding_window_causal_mask_function(2**41), {"local_size": 2**41}),
        (masks.bidirectional_mask_function, {"allow_is_causal_skip": False}),
        (
            lambda batch, head, query, key: (query - key).abs() <= 2**41,
            {"local_size": 2**41, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True},
        ),
    ],
)
def test_plain_masks_are_known_from_positions_alone(function: Any, arguments: dict[str, Any]) -> None:
    length = 2**40  # a tensor of this length would not fit anywhere
    mask = block_mask(1, length, length, mask_function=function, **arguments)
    assert mask.is_plain
    here, ahead = range(2**38, 2**39), range(2**39, 3 * 2**38)
    is_causal = arguments.get("allow_is_causal_skip", True)
    expected = [BlockKind.NOTHING, BlockKind.TRIANGLE, BlockKind.ALL] if is_causal else [BlockKind.ALL] * 3
    kinds = [mask.block(here, ahead), mask.block(here, here), mask.block(ahead, here)]
    assert kinds == expected


def test_a_padding_mask_that_hides_nothing_leaves_a_mask_plain() -> None:
    assert block_mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool)).is_plain
    assert not any(in_blocks(kind, LENGTH).is_plain for kind in ("padded", "packed", "window", "union"))


def test_keys_beyond_the_padding_mask_are_padding() -> None:
    mask = block_mask(1, 8, 8, attention_mask=torch.ones(1, 6, dtype=torch.bool))
    assert mask.block(range(7, 8), range(6, 8)) is BlockKind.NOTHING
    assert mask.block(range(7, 8), range(6)) is BlockKind.ALL


def test_a_block_is_evaluated_once() -> None:
    mask = in_blocks("packed", LENGTH)
    with patch.object(BlockMask, "_block_tensor", side_effect=mask._block_tensor) as made:
        for _ in range(3):
            assert mask.block(range(2), range(3, 5)) is BlockKind.NOTHING
    assert made.call_count == 1


def test_a_given_mask_may_have_one_row_for_all_queries() -> None:
    row = torch.tensor([True, True, False, True]).view(1, 1, 1, 4)
    seen = TensorMask(row, 4).block(range(1, 3), range(1, 4))
    assert isinstance(seen, Tensor)
    assert seen.tolist() == [[[[True, False, True]] * 2]]
    of_numbers = TensorMask(torch.ones(1, 1, 4, 4), 4)  # that hide none
    assert isinstance(of_numbers.block(range(2), range(2)), Tensor)


def test_older_releases_give_positions_for_lengths() -> None:
    with registered("blocks", block_mask):
        make = masks.AttentionMaskInterface()["blocks"]
    assert make(1, kv_length=8, cache_position=torch.arange(8)).lengths == (8, 8)
