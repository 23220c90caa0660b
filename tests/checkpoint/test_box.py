"""Boxes put a whole tensor together from every rank's piece, once, whatever it is cut into."""

import random
from math import prod

import pytest
import torch
from torch import Tensor

from echelon.checkpoint.box import Box, flat_boxes
from echelon.checkpoint.held import HeldTensor, held_piece, held_slice
from echelon.cluster.placement import Shard

SHARDS = (
    Shard(size=1, dim=0, blocks=(6,)),
    Shard(size=3, dim=0, blocks=(6,)),
    Shard(size=2, dim=1, blocks=(4, 2, 2)),
    Shard(size=2, dim=0, blocks=(5,), padded=(6,)),
    Shard(size=4, dim=1, blocks=(5, 3), padded=(8, 4)),
    Shard(size=4, dim=0, blocks=(3,), padded=(8,)),
    Shard(size=4, dim=0, blocks=(6, 2), copies=2),
    Shard(size=4, dim=1, blocks=(4, 2, 4, 2), stretches=2),
    Shard(size=4, dim=0, blocks=(4, 2, 4, 2), stretches=2, copies=2),
    Shard(size=2, dim=-1 + 3, blocks=(4,), axis="weight"),
)


def whole_of(shard: Shard) -> Tensor:
    shape = [3, 5, 7]
    shape[shard.dim] = sum(shard.blocks)
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


def put(into: Tensor, times: Tensor, held: HeldTensor) -> None:
    for part in held.parts:
        place = part.box.within(Box.whole(held.shape))
        into[place] = part.local
        times[place] += 1


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_the_pieces_of_all_ranks_make_the_whole_once_per_copy(shard: Shard) -> None:
    whole = whole_of(shard)
    found, times = torch.full_like(whole, -1), torch.zeros_like(whole)
    for rank in range(shard.size):
        held = held_piece("w", shard.local(whole, rank), shard, rank)
        assert held.shape == whole.shape
        put(found, times, held)
    assert torch.equal(found, whole)
    assert bool((times == shard.copies).all())


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_flat_slices_of_the_pieces_make_the_whole(shard: Shard) -> None:
    draw = random.Random(str(shard))
    whole = whole_of(shard)
    found, times = torch.full_like(whole, -1), torch.zeros_like(whole)
    for rank in range(shard.size):
        piece = shard.local(whole, rank)
        ends = sorted(draw.choices(range(piece.numel() + 1), k=3))
        for start, stop in zip([0, *ends], [*ends, piece.numel()], strict=True):
            flat = piece.view(-1)[start:stop].clone()
            put(found, times, held_slice("w", flat, start, piece.shape, shard, rank))
    assert torch.equal(found, whole)
    assert bool((times == shard.copies).all())


def test_parts_are_views_that_loading_may_write_to() -> None:
    shard = Shard(size=2, dim=1, blocks=(4, 2))
    piece = shard.local(torch.zeros(3, 6), 1)
    for part in held_piece("w", piece, shard, 1).parts:
        part.local.fill_(1.0)
    assert bool((piece == 1).all())


def test_a_flat_stretch_takes_few_boxes_in_its_order() -> None:
    shape = (4, 3, 5)
    whole = torch.arange(60).view(shape)
    for start in range(61):
        for stop in range(start, 61):
            boxes = list(flat_boxes(start, stop, shape))
            assert len(boxes) <= 2 * len(shape) - 1
            found = [whole[box.within(Box.whole(shape))].flatten() for box in boxes]
            assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))


def test_scalars_and_empty_tensors_are_held() -> None:
    assert held_piece("step", torch.tensor(3.0), None, 0).parts[0].box == Box((), ())
    assert held_piece("none", torch.empty(0, 4), None, 0).parts == ()


def test_boxes_without_anything_in_common() -> None:
    assert Box((0, 0), (2, 2)).common(Box((2, 0), (2, 2))) is None
    assert Box((0, 0), (2, 3)).common(Box((1, 1), (4, 4))) == Box((1, 1), (1, 2))
