"""Blocks of masks, without processes."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as masks

from echelon.shardformer.sequence.block_mask import BlockMask, GivenMask, Seen, block_mask

from .masks import KINDS, as_tensor, in_blocks, whole

LENGTH = 13
RANGES = (range(4), range(4, 8), range(8, 12), range(12, 13), range(2, 7), range(13), range(6, 7))


def blocks() -> Iterator[tuple[range, range]]:
    yield from ((queries, keys) for queries in RANGES for keys in RANGES)


def cut(mask: Tensor, queries: range, keys: range) -> Tensor:
    return mask[:, :, queries.start : queries.stop, keys.start : keys.stop]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_mask_that_transformers_makes(kind: str) -> None:
    mask, expected = in_blocks(kind, LENGTH), whole(kind, LENGTH)
    for queries, keys in [*blocks(), *blocks()]:  # a block is known when it is asked for again
        seen = mask.block(queries, keys)
        block = cut(expected, queries, keys)
        assert torch.equal(as_tensor(seen, queries, keys).expand_as(block), block)
        if isinstance(seen, Tensor):
            assert block.any() and not block.all()  # else a word would have said it


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
def test_plain_masks_are_told_from_positions_alone(function: Any, arguments: dict[str, Any]) -> None:
    length = 2**40  # a tensor of this length would not fit anywhere
    mask = block_mask(1, length, length, mask_function=function, **arguments)
    assert mask.is_plain
    here, ahead = range(2**38, 2**39), range(2**39, 3 * 2**38)
    is_causal = arguments.get("allow_is_causal_skip", True)
    expected = [Seen.NOTHING, Seen.TRIANGLE, Seen.ALL] if is_causal else [Seen.ALL] * 3
    found = [mask.block(here, ahead), mask.block(here, here), mask.block(ahead, here)]
    assert found == expected


@pytest.mark.parametrize("kind", ["padded", "packed", "window", "union"])
def test_other_masks_are_not_plain(kind: str) -> None:
    assert not in_blocks(kind, LENGTH).is_plain


def test_padding_of_which_there_is_none_leaves_a_mask_plain() -> None:
    assert block_mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool)).is_plain


def test_what_padding_is_too_short_for_is_padding() -> None:
    mask = block_mask(1, 8, 8, attention_mask=torch.ones(1, 6, dtype=torch.bool))
    assert mask.block(range(7, 8), range(6, 8)) is Seen.NOTHING
    assert mask.block(range(7, 8), range(6)) is Seen.ALL


def test_a_word_that_is_known_is_not_looked_for_again() -> None:
    mask = in_blocks("packed", LENGTH)
    with patch.object(BlockMask, "_tensor", side_effect=mask._tensor) as made:
        for _ in range(3):
            assert mask.block(range(2), range(3, 5)) is Seen.NOTHING
    assert made.call_count == 1


@pytest.mark.parametrize("kind", ["padded", "packed", "bidirectional padded"])
def test_masks_given_as_tensors_are_cut(kind: str) -> None:
    expected = whole(kind, LENGTH)
    least = torch.finfo(torch.float32).min
    given = torch.zeros(expected.shape).masked_fill(~expected, least)
    for queries, keys in blocks():
        block = cut(expected, queries, keys)
        seen = GivenMask(expected, LENGTH).block(queries, keys)
        assert torch.equal(as_tensor(seen, queries, keys).expand_as(block), block)
        added = GivenMask(given, LENGTH).block(queries, keys)
        if isinstance(added, Seen):
            assert torch.equal(as_tensor(added, queries, keys).expand_as(block), block)
        else:
            assert torch.equal(added, cut(given, queries, keys))


def test_numbers_that_hide_nothing_are_not_lost() -> None:
    assert isinstance(GivenMask(torch.ones(1, 1, 4, 4), 4).block(range(2), range(2)), Tensor)


def test_a_mask_for_all_queries_alike_is_cut_too() -> None:
    row = torch.tensor([True, True, False, True]).view(1, 1, 1, 4)
    seen = GivenMask(row, 4).block(range(1, 3), range(1, 4))
    assert isinstance(seen, Tensor)
    assert seen.tolist() == [[[[True, False, True]] * 2]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 4, dtype=torch.bool), "shape (2, 4) for a sequence of 4"),
        (torch.ones(2, 1, 3, 4, dtype=torch.bool), "shape (2, 1, 3, 4)"),
        (torch.ones(2, 1, 4, 5), "give one of (batch, 4), False at padding, or of (batch, 1, 4, 4)"),
        (torch.ones(2, 1, 4, 4, dtype=torch.long), "torch.int64"),
        (torch.ones(2, 1, 4, 4, requires_grad=True), "takes gradients"),
        (torch.full((2, 1, 4, 4), torch.finfo(torch.float32).min), "numbers that all hide, down to -3.403e"),
        (torch.full((2, 1, 1, 4), -torch.inf), "give a mask of (batch, 4), 0 at padding"),
    ],
)
def test_a_mask_that_cannot_be_used_is_refused(mask: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        GivenMask(mask, 4)


def test_older_releases_give_positions_for_lengths() -> None:
    mask = block_mask(1, kv_length=8, cache_position=torch.arange(8))
    assert mask.lengths == (8, 8)


def test_a_cache_of_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="begin at position 7"):
        block_mask(1, kv_length=8, cache_position=torch.tensor([7]))
    with pytest.raises(ValueError, match="use_cache=False"):
        block_mask(1, 1, 8, q_offset=7, mask_function=masks.causal_mask_function)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_are_levelled_that_see_no_key(kind: str) -> None:
    expected = ~whole(kind, LENGTH).any(-1)
    mask = in_blocks(kind, LENGTH, levels=True)
    for queries, keys in blocks():
        mask.block(queries, keys)
        levelled, rows = mask.levelled(queries), expected[:, :, queries.start : queries.stop]
        assert (levelled is not None) == bool(rows.any())
        assert levelled is None or torch.equal(levelled, rows)
        assert in_blocks(kind, LENGTH).levelled(queries) is None
