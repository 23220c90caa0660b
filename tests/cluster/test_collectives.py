"""Each autograd collective against the same computation on whole tensors, in integers: equal exactly."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster import collectives
from echelon.cluster.mesh import ParallelMesh

from ..pool import Pool

SHAPE = (4, 8, 12)


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def rank_chunk(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def summed(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


class Dense:
    """The values of all ranks. R: one whole tensor; S: its slices; P: the terms of a sum."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        self.full = integers(0, *SHAPE)
        self.terms = [integers(1 + rank, *SHAPE) for rank in ranks]
        # The consumer multiplies by a weight: one and the same, or each rank by its own.
        self.weight = integers(100, *SHAPE)
        self.weights = [integers(101 + rank, *SHAPE) for rank in ranks]


def compare_all_dims(name: str) -> None:
    for dim in (0, 1, 2, -1):
        compare(name, dim)


def compare(name: str, dim: int) -> None:
    """Forward and backward of one collective on this rank, against the dense values."""
    dense, rank, world = Dense(), dist.get_rank(), dist.group.WORLD
    full, weight, rank_weight, weights = dense.full, dense.weight, dense.weights[rank], summed(dense.weights)
    full_chunk, weight_chunk, weights_chunk = (rank_chunk(tensor, dim) for tensor in (full, weight, weights))
    cases = {  # input, weight, output, gradient of the input
        "copy_to": (full, rank_weight, full, weights),
        "reduce_from": (dense.terms[rank], weight, summed(dense.terms), weight),
        "scatter_to": (full, weight_chunk, full_chunk, weight),
        "gather_from": (full_chunk, weight, full, weight_chunk),
        "gather_to": (full_chunk, rank_weight, full, weights_chunk),
    }
    original, weight, output, gradient = cases[name]
    function: Callable[..., Tensor] = getattr(collectives, name)
    x = original.clone().requires_grad_()
    argument = x * 1 if name == "reduce_from" else x  # which becomes the sum
    y = function(argument, world) if name in ("copy_to", "reduce_from") else function(x, world, dim)
    (y * weight).sum().backward()
    assert torch.equal(y, output), "forward"
    assert x.grad is not None
    assert torch.equal(x.grad, gradient), "backward"
    assert torch.equal(x, original), "the input was written to"
    if name == "reduce_from":
        assert y is argument, "the sum has memory of its own"
        y += 1  # as Falcon's layers do with outputs of theirs


def pass_through_a_group_of_one() -> None:
    alone = ParallelMesh(dp=2).group("tp")
    x = torch.ones(3, requires_grad=True)
    for function in (collectives.copy_to, collectives.reduce_from):
        assert function(x, alone) is x
    for name in ("scatter_to", "gather_from", "gather_to"):
        assert getattr(collectives, name)(x, alone, 0) is x


def take_a_transposed_input() -> None:
    world = dist.group.WORLD
    x = integers(0, 6, 4).t()
    assert not x.is_contiguous()
    assert torch.equal(collectives.all_gather(x, world, 1), torch.cat([x, x], 1))
    assert torch.equal(collectives.all_reduce(x, world), 2 * x)
    assert torch.equal(collectives.sum_slice(x, world, 1), rank_chunk(2 * x, 1))
    assert collectives.rank_slice(x, world, 1).is_contiguous()
    gathered = collectives.gather_to(x.detach().requires_grad_(), world, 0)
    (gradient,) = torch.autograd.grad(gathered.t().contiguous().sum(), gathered)  # arrives with odd strides
    assert gradient.shape == (8, 6)


def reduce_sixteen_bits() -> None:
    x = torch.full((4,), 1.5, dtype=torch.bfloat16)
    assert torch.equal(collectives.all_reduce(x, dist.group.WORLD), 2 * x)
    assert torch.equal(collectives.sum_slice(x.half(), dist.group.WORLD, 0), torch.full((2,), 3.0).half())


def split_what_does_not_divide() -> None:
    with pytest.raises(AssertionError, match="length 3 of dim 0 is not divisible by 2 ranks"):
        collectives.all_to_all(torch.zeros(3, 2), dist.group.WORLD, split_dim=0, gather_dim=1)
    collectives.scatter_to(torch.zeros(3), dist.group.WORLD, 0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["copy_to", "reduce_from", "scatter_to", "gather_from", "gather_to"])
def test_a_collective_and_its_backward_equal_the_dense_computation(
    pool: Pool, name: str, world_size: int
) -> None:
    pool.run(world_size, compare_all_dims, name)


def test_a_group_of_one_passes_the_tensor_itself(pool: Pool) -> None:
    pool.run(2, pass_through_a_group_of_one)


def test_inputs_need_not_be_contiguous(pool: Pool) -> None:
    pool.run(2, take_a_transposed_input)


def test_sixteen_bits_are_reduced(pool: Pool) -> None:
    pool.run(2, reduce_sixteen_bits)


def test_a_length_that_does_not_divide_is_not_split_silently(pool: Pool) -> None:
    errors = pool.run_failing(2, split_what_does_not_divide)
    assert [str(error) for error in errors] == ["length 3 of dim 0 is not divisible by 2 ranks"] * 2


DIMS = [(0, 1), (1, 0), (0, 2), (2, 1), (1, 2)]


def compare_dims(split_dim: int, gather_dim: int) -> None:
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    full, weight = torch.randint(-9, 10, (2, 12, 24, 36), generator=torch.Generator().manual_seed(0)).float()
    shard = full.chunk(ranks, gather_dim)[rank]
    for x in (shard.contiguous().clone(), shard.detach()):  # the second lies in pieces in memory
        x.requires_grad_()
        y = collectives.all_to_all(x, group, split_dim=split_dim, gather_dim=gather_dim)
        (y * weight.chunk(ranks, split_dim)[rank]).sum().backward()
        assert torch.equal(y, full.chunk(ranks, split_dim)[rank]), "forward"
        assert x.grad is not None
        assert torch.equal(x.grad, weight.chunk(ranks, gather_dim)[rank]), "backward"


def compare_all() -> None:
    for dims in DIMS:
        compare_dims(*dims)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slices_along_one_dim_become_slices_along_another(pool: Pool, ranks: int) -> None:
    pool.run(ranks, compare_all)
