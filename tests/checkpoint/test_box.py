"""Boxes of all ranks' shards cover a global tensor once, and one rank sends each box to the writer."""

import random
from collections.abc import Iterable
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from echelon.checkpoint.exchange import Offer, entries_of, plan_files
from echelon.checkpoint.local_tensors import LocalTensor, local_piece, local_shard
from echelon.checkpoint.tensor_file import Entry
from echelon.cluster.box import Box, coverage_errors, flat_boxes
from echelon.cluster.placement import PlacedShard, Shard

from .handmade import columns, flat_slices

SHARDS = (
    Shard(size=1, dim=0, blocks=(6,)),
    Shard(size=3, dim=0, blocks=(6,)),
    Shard(size=2, dim=1, blocks=(4, 2, 2)),
    Shard(size=2, dim=0, blocks=(5,), padded=(6,)),
    Shard(size=4, dim=1, blocks=(5, 3), padded=(8, 4)),
    Shard(size=4, dim=0, blocks=(3,), padded=(8,)),
    Shard(size=4, dim=0, blocks=(6, 2), replicas=2),
    Shard(size=4, dim=1, blocks=(4, 2, 4, 2), stretches=2),
    Shard(size=4, dim=0, blocks=(4, 2, 4, 2), stretches=2, replicas=2),
    Shard(size=2, dim=-1 + 3, blocks=(4,), axis="wp"),
)


def tensor_of(shard: Shard) -> Tensor:
    shape = [3, 5, 7]
    shape[shard.dim] = sum(shard.blocks)
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


def require_cover(tensor: Tensor, locals_of_ranks: Iterable[LocalTensor], num_copies: int) -> None:
    """Require that the boxes of all ranks have every entry of a tensor, in this number of copies."""
    assembled, times = torch.full_like(tensor, -1), torch.zeros_like(tensor)
    for local in locals_of_ranks:
        assert local.shape == tensor.shape
        for piece in local.boxes:
            place = piece.box.within(Box.full(local.shape))
            assembled[place] = piece.local
            times[place] += 1
    assert torch.equal(assembled, tensor)
    assert bool((times == num_copies).all())


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_the_shards_of_all_ranks_cover_the_tensor_once_per_copy(shard: Shard) -> None:
    tensor = tensor_of(shard)
    shards = (
        local_shard("w", shard.local(tensor, rank), [PlacedShard(shard, rank)]) for rank in range(shard.size)
    )
    require_cover(tensor, shards, shard.replicas)


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_pieces_of_the_shards_cover_the_tensor(shard: Shard) -> None:
    draw = random.Random(str(shard))
    tensor, pieces = tensor_of(shard), []
    for rank in range(shard.size):
        local = shard.local(tensor, rank)
        ends = sorted(draw.choices(range(local.numel() + 1), k=3))
        for start, stop in zip([0, *ends], [*ends, local.numel()], strict=True):
            flat = local.view(-1)[start:stop].clone()
            pieces.append(local_piece("w", flat, start, local.shape, [PlacedShard(shard, rank)]))
    require_cover(tensor, pieces, shard.replicas)


INNER = {
    "another dim": (Shard(size=2, dim=1, blocks=(5,), padded=(6,)), (6, 5)),
    # The outer padding is data of the inner shard.
    "the same dim": (Shard(size=2, dim=0, blocks=(2, 2)), (8, 5)),
    "replicas": (Shard(size=4, dim=1, blocks=(2, 3), padded=(2, 4), replicas=2), (5, 5)),
}


@pytest.mark.parametrize("inner", INNER)
def test_shards_over_two_axes_cover_the_tensor(inner: str) -> None:
    within, shape = INNER[inner]
    outer = Shard(size=2, dim=0, blocks=(shape[0],), padded=(-(-shape[0] // 2) * 2,), axis="wp")
    tensor, unsplit, pieces = torch.arange(1.0, 1 + prod(shape)).view(shape), [], []
    for first, second in product(range(outer.size), range(within.size)):
        local = within.local(outer.local(tensor, first), second)
        shards = [PlacedShard(outer, first), PlacedShard(within, second)]
        unsplit.append(local_shard("w", local, shards))
        for start in range(0, local.numel(), 3):
            flat = local.view(-1)[start : start + 3]
            pieces.append(local_piece("w", flat, start, local.shape, shards))
    for parts in (unsplit, pieces):
        require_cover(tensor, parts, within.replicas)


def test_parts_are_views_that_loading_may_write_to() -> None:
    shard = Shard(size=2, dim=1, blocks=(4, 2))
    local = shard.local(torch.zeros(3, 6), 1)
    for piece in local_shard("w", local, [PlacedShard(shard, 1)]).boxes:
        piece.local.fill_(1.0)
    assert bool((local == 1).all())


def test_a_flat_interval_is_few_boxes_in_order() -> None:
    shape = (4, 3, 5)
    tensor = torch.arange(60).view(shape)
    for start in range(61):
        for stop in range(start, 61):
            boxes = list(flat_boxes(start, stop, shape))
            assert len(boxes) <= 2 * len(shape) - 1
            entries = [entry for box in boxes for entry in tensor[box.within(Box.full(shape))].flatten()]
            assert entries == list(range(start, stop))


def test_scalars_have_one_box_and_empty_tensors_none() -> None:
    assert local_shard("step", torch.tensor(3.0)).boxes[0].box == Box((), ())
    assert local_shard("none", torch.empty(0, 4)).boxes == ()


def test_boxes_without_anything_in_common() -> None:
    assert Box((0, 0), (2, 2)).common(Box((2, 0), (2, 2))) is None
    assert Box((0, 0), (2, 3)).common(Box((1, 1), (4, 4))) == Box((1, 1), (1, 2))


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (3, 4, 5), (0, 3), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cut", [flat_slices, columns])
def test_shards_of_layouts_cover_the_tensor(shape: tuple[int, ...], ranks: int, cut) -> None:
    boxes = [box for mine in cut(shape, ranks) for box in mine]
    assert coverage_errors(shape, boxes) == []


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 5)])
def test_any_missing_or_duplicate_box_is_reported(shape: tuple[int, ...]) -> None:
    boxes = [box for mine in flat_slices(shape, 3) for box in mine]
    for index, box in enumerate(boxes):
        (fault,) = coverage_errors(shape, boxes[:index] + boxes[index + 1 :])
        assert fault.startswith(f"{box.numel} of its ")
        (fault,) = coverage_errors(shape, [*boxes, box])
        assert fault.endswith("overlap")


def test_an_overlap_is_reported_if_as_many_entries_are_missing() -> None:
    boxes = [Box((0, 0), (4, 2)), Box((0, 1), (4, 2))]
    assert coverage_errors((4, 4), boxes) == ["[0:4, 0:2] and [0:4, 1:3] overlap"]
    assert coverage_errors((), []) == ["1 of its 1 entries are missing"]
    assert coverage_errors((), [Box((), ()), Box((), ())]) == ["[] and [] overlap"]


def test_a_box_outside_of_the_tensor_is_reported() -> None:
    boxes = list(flat_boxes(0, 8, (2, 4)))
    assert coverage_errors((2, 3), boxes) == ["[0:2, 0:4] is out of its bounds"]


def entry(name: str, rows: int) -> Entry:
    return Entry(name, (rows, 2), torch.float32)


def holding(rows: int, start: int, stop: int) -> Offer:
    return Offer((rows, 2), torch.float32, (Box((start, 0), (stop - start, 2)),))


def test_every_rank_writes_if_all_have_all_tensors() -> None:
    names = [f"w{number}" for number in range(8)]
    offers = [{name: holding(4, 0, 4) for name in names}] * 4
    files = {name: [entry(name, 4)] for name in names}
    plans = plan_files(files, offers)
    assert sorted(plan.writer for plan in plans) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all({*plan.tensors[0].sources.values()} == {plan.writer} for plan in plans)


def test_a_box_is_sent_once_by_the_rank_that_sent_least() -> None:
    # Two tensor ranks with two replicas each: ranks 0 and 2 have the upper half, 1 and 3 the lower.
    offers = [{name: holding(4, half * 2, half * 2 + 2) for name in "abcd"} for half in (0, 1, 0, 1)]
    plans = plan_files({name: [entry(name, 4)] for name in "abcd"}, offers)
    assert [plan.writer for plan in plans] == [0, 1, 2, 3]
    for plan in plans:
        sources = plan.tensors[0].sources
        assert [*sources] == [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]
        assert plan.writer in sources.values(), "a writer sends itself nothing"
    sent = [rank for plan in plans for rank in plan.tensors[0].sources.values() if rank != plan.writer]
    assert sorted(sent) == [0, 1, 2, 3]


def test_tensors_come_in_the_order_of_the_model() -> None:
    offers = [{"late": holding(1, 0, 1)}, {"first": holding(1, 0, 1), "other": holding(1, 0, 1)}]
    assert [entry.name for entry in entries_of(offers, ["first", "late"])] == ["first", "late", "other"]
