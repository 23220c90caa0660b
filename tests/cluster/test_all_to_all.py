"""The all-to-all that autograd passes through, against whole tensors, in integers: equal exactly."""

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.collectives import all_to_all

from ..pool import Pool

DIMS = [(0, 1), (1, 0), (0, 2), (2, 1), (1, 2)]


def compare(split_dim: int, gather_dim: int) -> None:
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    whole, weight = torch.randint(-9, 10, (2, 12, 24, 36), generator=torch.Generator().manual_seed(0)).float()
    part = whole.chunk(ranks, gather_dim)[rank]
    for x in (part.contiguous().clone(), part.detach()):  # the second lies in pieces in memory
        x.requires_grad_()
        y = all_to_all(x, group, split_dim=split_dim, gather_dim=gather_dim)
        (y * weight.chunk(ranks, split_dim)[rank]).sum().backward()
        assert torch.equal(y, whole.chunk(ranks, split_dim)[rank]), "forward"
        assert x.grad is not None
        assert torch.equal(x.grad, weight.chunk(ranks, gather_dim)[rank]), "backward"


def compare_all() -> None:
    for dims in DIMS:
        compare(*dims)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slices_along_one_dim_become_slices_along_another(pool: Pool, ranks: int) -> None:
    pool.run(ranks, compare_all)


def split_unevenly() -> None:
    group = dist.group.WORLD
    assert group is not None
    all_to_all(torch.zeros(3, 2), group, split_dim=0, gather_dim=1)


def test_what_does_not_divide_is_an_error(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="length 3 of dim 0 does not divide by 2 ranks"):
        pool.run(2, split_unevenly)
