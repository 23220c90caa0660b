"""Sums that ranks read from each other's memory."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import process_memory, read_sums
from echelon.cluster.collectives import all_reduce, copy_to
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic

from ..pool import Pool


def values(rank: int, number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_of_the_whole_and_equal_to_the_bit(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    sums = pool.run(ranks, check_sums, dtype)
    assert all(torch.equal(first, other) for other in sums for first in [sums[0]])


@patch.object(read_sums, "_PIECE", 64)  # several pieces, and a shorter last one
def check_sums(dtype: torch.dtype) -> torch.Tensor:
    """Of growing and shrinking tensors, one after the other without a barrier, and of what is not contiguous."""
    group = dist.group.WORLD
    found = []
    for number, shape in enumerate([(3, 5), (40, 11), (1,), (), (7, 31), (40, 11)]):
        own = values(dist.get_rank(), number, *shape).to(dtype)
        others = [values(rank, number, *shape).to(dtype) for rank in range(dist.get_world_size())]
        before = own.clone()
        total = all_reduce(own.t() if own.ndim == 2 else own, group)
        total = total.t() if own.ndim == 2 else total
        assert torch.equal(own, before)
        expected = torch.stack([each.double() for each in others]).sum(0)
        tolerance = 1e-6 if dtype in (torch.float32, torch.float64) else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)
        assert total.dtype == dtype
        found.append(total.flatten())
    assert read_sums._SUMS[group] is not None
    return torch.cat(found)


def test_what_a_rank_writes_after_a_sum_reaches_no_other(pool: Pool) -> None:
    pool.run(2, check_writes)


def check_writes() -> None:
    """The first rank is far ahead of the second in every sum."""
    group = dist.group.WORLD
    for number in range(6):
        if dist.get_rank() == 1:
            torch.zeros(300, 300) @ torch.zeros(300, 300)
        own = torch.full((2**16,), float(number + dist.get_rank()))
        total = all_reduce(own, group)
        own.fill_(-1e9)
        assert (total == 2 * number + 1).all()
        total.fill_(1e9)


def test_where_memory_cannot_be_read_and_beyond_four_ranks_the_backend_sums(pool: Pool) -> None:
    pool.run(2, check_fallback)
    pool.run(5, check_many)


@patch.object(process_memory, "_PROCESS_VM_READV", None)
def check_fallback() -> None:
    group = dist.new_group([0, 1])
    assert (all_reduce(torch.ones(3), group) == 2).all()
    assert read_sums._SUMS[group] is None


def check_many() -> None:
    assert (all_reduce(torch.ones(3), dist.group.WORLD) == 5).all()
    assert dist.group.WORLD not in read_sums._SUMS


def test_tensors_of_different_sizes_are_told_on_every_rank(pool: Pool) -> None:
    for message in pool.run(3, sizes_told):
        assert (
            "rank 0 of the group 8 bytes, rank 1 of the group 12 bytes, rank 2 of the group 16 bytes"
            in message
        )
        assert "the same batch" in message


def sizes_told() -> str:
    with pytest.raises(RuntimeError, match="different sizes") as raised:
        all_reduce(torch.ones(2 + dist.get_rank()), dist.group.WORLD)
    return str(raised.value)


def test_integers_and_nothing_are_summed_too(pool: Pool) -> None:
    pool.run(2, check_others)


def check_others() -> None:
    group = dist.group.WORLD
    assert all_reduce(torch.tensor([1, 2]), group).tolist() == [2, 4]
    assert all_reduce(torch.empty(0), group).shape == (0,)


def test_the_ledger_counts_one_all_reduce_of_the_tensor(pool: Pool) -> None:
    pool.run(2, check_ledger)


def check_ledger() -> None:
    mesh = ParallelMesh(tp=2)
    all_reduce(torch.ones(2), mesh.group("tp"))  # the first one finds out how
    x = torch.ones(5000, requires_grad=True)
    with Traffic(mesh) as traffic:
        copy_to(x, mesh.group("tp")).sum().backward()
    assert {key: (count.calls, count.nbytes) for key, count in traffic.counts.items()} == {
        ("tp", "all_reduce"): (1, 20000)
    }
    assert x.grad is not None and (x.grad == 2).all()
