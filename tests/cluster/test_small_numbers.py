"""The small collectives of a step, whichever way they go."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import process_memory, small_numbers
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.small_numbers import all_reduce_, begin_gathering
from echelon.cluster.traffic import Traffic

from ..pool import Pool

LIMIT = 2**63 - 1
WAYS = pytest.mark.parametrize("is_near", [True, False], ids=["told", "gloo"])


def new_group(is_near: bool) -> dist.ProcessGroup:
    """All ranks, who can read each other's memory or not."""
    group = dist.new_group()
    with patch.object(
        process_memory, "_PROCESS_VM_READV", process_memory._PROCESS_VM_READV if is_near else None
    ):
        begin_gathering((0,), group)()
    assert (small_numbers._LINES[group] is not None) == is_near
    return group


@WAYS
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_numbers_of_all(pool: Pool, ranks: int, is_near: bool) -> None:
    pool.run(ranks, check_gathering, is_near)


def check_gathering(is_near: bool) -> None:
    group, rank, ranks = new_group(is_near), dist.get_rank(), range(dist.get_world_size())
    first = begin_gathering((rank, -LIMIT), group)
    second = begin_gathering((), group)
    many = begin_gathering([rank] * 1000, group)  # more than fit a message
    third = begin_gathering((rank, LIMIT), group)
    # What began first need not end first.
    assert third() == [(each, LIMIT) for each in ranks]
    assert many() == [(each,) * 1000 for each in ranks]
    assert second() == [() for _ in ranks]
    assert first() == [(each, -LIMIT) for each in ranks]


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_maxima_are_equal_to_the_bit(pool: Pool, dtype: torch.dtype, is_near: bool) -> None:
    first, *others = pool.run(3, reduce_all, dtype, is_near)
    assert all(other == first for other in others)


def reduce_all(dtype: torch.dtype, is_near: bool) -> list[Any]:
    group, results = new_group(is_near), []
    for shape in ((), (0,), (5,), (2, 3), (600,)):
        terms = [
            torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)
            for rank in range(3)
        ]
        for operation, expected in (
            (dist.ReduceOp.SUM, torch.stack(terms).sum(0)),
            (dist.ReduceOp.MAX, torch.stack(terms).amax(0)),
        ):
            x = terms[dist.get_rank()].clone()
            assert all_reduce_(x, operation, group) is x
            assert x.shape == shape and x.dtype == dtype
            torch.testing.assert_close(x, expected)
            results.append(x.tolist())
    return results


@WAYS
def test_what_is_not_finite_is_known_to_all(pool: Pool, is_near: bool) -> None:
    pool.run(2, check_not_finite, is_near)


def check_not_finite(is_near: bool) -> None:
    group, rank = new_group(is_near), dist.get_rank()
    assert all_reduce_(torch.tensor([1.0, torch.inf][rank]), dist.ReduceOp.SUM, group).isinf()
    assert all_reduce_(torch.tensor([torch.nan, 1.0][rank]), dist.ReduceOp.SUM, group).isnan()
    assert all_reduce_(torch.tensor([1.0, torch.inf][rank]), dist.ReduceOp.MAX, group).isinf()


@WAYS
def test_they_are_counted_as_what_they_are(pool: Pool, is_near: bool) -> None:
    counts = pool.run(2, count_traffic, is_near)[0]
    # Two numbers, in a message of ten; see `tagged`.
    assert counts == {"small all_gather": (1, 160), "small all_reduce": (1, 12)}


def count_traffic(is_near: bool) -> dict[str, tuple[int, int]]:
    group = new_group(is_near)
    with Traffic(ParallelMesh()) as traffic:
        begin_gathering((1, 2), group)()
        all_reduce_(torch.ones(3), dist.ReduceOp.SUM, group)
    return {kind: (count.calls, count.nbytes) for (_, kind), count in traffic.counts.items()}
