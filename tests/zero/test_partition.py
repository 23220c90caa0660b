"""Slices sharded over groups of data-parallel ranks (ZeRO-1.5), and averages over all data-parallel ranks."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import PartialGrad, Placement, Replicated, Shard, place
from echelon.zero.partition import ManagedParameter, Partition

from ..cluster.helpers import SLICES, with_slices
from ..late_completion import late_completion
from ..pool import Pool
from .helpers import assert_equal, loss_of, mean_gradients, shard, small_model, weights_of


@SLICES
@pytest.mark.parametrize(("num_slices", "owned"), [(1, "0000"), (2, "0101"), (4, "0123")])
def test_neighbours_shard_and_all_ranks_average(
    pool: Pool, num_slices: int, owned: str, slices: bool
) -> None:
    by_rank = pool.run(4, with_slices, slices, average, num_slices)
    assert "".join(str(index) for index, *_ in by_rank) == owned
    assert [counts for _, counts, *_ in by_rank] == [rank < num_slices for rank in range(4)]
    for index, _, local_slice, gathered in by_rank:
        expected = [1.5 + 10 * place for place in range(8)]
        length = 8 // num_slices
        assert local_slice == expected[index * length : (index + 1) * length]
        assert gathered == expected


def average(num_slices: int) -> tuple[int, bool, list[float], list[float]]:
    partition = Partition.of(ParallelMesh(), num_slices)
    gradients = torch.arange(8.0) * 10 + dist.get_rank()
    partition.average_(gradients).wait()
    local_slice = partition.local_slice(gradients)
    gathered = partition.gathered(local_slice)
    return partition.index, partition.is_counted, local_slice.tolist(), gathered.tolist()


@SLICES
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_a_mean_of_16_bits_is_finite_where_the_sum_is_not(pool: Pool, num_slices: int, slices: bool) -> None:
    pool.run(4, with_slices, slices, average_large, num_slices)


def average_large(num_slices: int) -> None:
    partition = Partition.of(ParallelMesh(), num_slices)
    gradients = torch.full((8,), 60000.0)
    partition.average_(gradients, torch.float16).wait()
    assert partition.local_slice(gradients).eq(60000).all()


@SLICES
@pytest.mark.parametrize("num_slices", [1, 3])
def test_a_mean_in_16_bits_is_divided_before_it_is_rounded(pool: Pool, num_slices: int, slices: bool) -> None:
    pool.run(3, with_slices, slices, average_thirds, num_slices)


def average_thirds(num_slices: int) -> None:
    partition = Partition.of(ParallelMesh(), num_slices)
    gradients = torch.randn(96, generator=torch.Generator().manual_seed(0))
    expected = partition.local_slice((3 * (gradients / 3).bfloat16().float()).bfloat16().float())
    partition.average_(gradients, torch.bfloat16).wait()
    assert torch.equal(partition.local_slice(gradients), expected)


@pytest.mark.parametrize(
    ("num_slices", "slices", "parts"),
    [(4, 2, [[0, 2], [1, 3]]), (2, 1, [[0, 2], [1, 3]]), (1, 1, [[0, 2], [1, 3]])],
)
def test_a_sharded_parameter_is_averaged_over_the_ranks_with_the_same_shard(
    pool: Pool, num_slices: int, slices: int, parts: list[list[int]]
) -> None:
    for rank, (ranks, index, counts, local_slice) in enumerate(
        pool.run(4, average_over_replicas, num_slices)
    ):
        assert ranks == parts[rank % 2]
        assert index == (rank // 2 if slices == 2 else 0)
        assert counts == (slices == 2 or rank < 2)
        expected = [10 * place + sum(ranks) / 2 for place in range(8)]
        length = 8 // slices
        assert local_slice == expected[index * length : (index + 1) * length]


def average_over_replicas(num_slices: int) -> tuple[list[int], int, bool, list[float]]:
    partition = Partition.all_of(ParallelMesh(wp=2), num_slices)["wp"]
    gradients = torch.arange(8.0) * 10 + dist.get_rank()
    partition.average_(gradients).wait()
    ranks = dist.get_process_group_ranks(partition.group)
    return ranks, partition.index, partition.is_counted, partition.local_slice(gradients).tolist()


def test_the_second_sum_of_an_average_begins_without_a_wait(pool: Pool) -> None:
    for rank, (entered, local_slice) in enumerate(pool.run(4, average_beside)):
        assert entered == 1, "before anybody waits, on a stream that waits for the first sum"
        assert local_slice == [1.5 + 10 * place for place in range(8)][rank % 2 * 4 :][:4]


def average_beside() -> tuple[int, list[float]]:
    class Stream:
        entered = 0

        def __enter__(self) -> None:
            sums.assert_not_called()
            self.entered += 1

        def __exit__(self, *_: object) -> None:
            sums.assert_called_once()

    stream = Stream()
    partition = replace(Partition.of(ParallelMesh(), 2), waiting_stream=stream)
    with late_completion(), mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        gradients = torch.arange(8.0) * 10 + dist.get_rank()
        partition.average_(gradients).wait()
    return stream.entered, partition.local_slice(gradients).tolist()


def test_placement_and_tie_determine_where_a_gradient_is_summed_and_counted(pool: Pool) -> None:
    reductions = pool.run(4, reduced_over)
    neighbours = [[0, 1], [0, 1], [2, 3], [2, 3]]
    for rank, reduction in enumerate(reductions):
        assert reduction["whole"] == ([], rank == 0)
        assert reduction["norm"] == ([[0, 1, 2, 3]], rank == 0)
        assert reduction["key"] == ([neighbours[rank]], rank % 2 == 0)
    same_place = [[0, 2], [1, 3], [0, 2], [1, 3]]  # in the stages' tensor axes
    tied = pool.run(4, reduced_over_tie)
    assert tied == [([neighbours[rank], same_place[rank]], rank == 0) for rank in range(4)]


def reduced_over() -> dict[str, tuple[list[list[int]], bool]]:
    mesh = ParallelMesh(tp=4)
    placements = {
        "whole": Replicated(size=4),
        "norm": PartialGrad(size=4),
        "key": Shard(size=4, dim=0, blocks=(4,), replicas=2),
    }
    return {name: how_reduced(placement, mesh) for name, placement in placements.items()}


def reduced_over_tie() -> tuple[list[list[int]], bool]:
    mesh = ParallelMesh(pp=2, tp=2)
    return how_reduced(PartialGrad(size=2), mesh, mesh.group("pp"))


def how_reduced(
    placement: Placement, mesh: ParallelMesh, tie_group: dist.ProcessGroup | None = None
) -> tuple[list[list[int]], bool]:
    parameter = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="w is neither sharded, partial nor replicated over the axis 'tp'"):
        ManagedParameter.of("w", parameter, mesh=mesh)
    place(parameter, placement, mesh.rank("tp"))
    managed = ManagedParameter.of("w", parameter, mesh=mesh, tie_group=tie_group)
    return [dist.get_process_group_ranks(group) for group in managed.sum_groups], managed.is_primary


@pytest.mark.parametrize("stage", [1, 2])
def test_states_lie_on_two_ranks_of_four(pool: Pool, stage: int) -> None:
    norms = pool.run(4, train_in_pairs, stage)
    assert len(set(norms)) == 1


def train_in_pairs(stage: int) -> float:
    model, rank = small_model(), dist.get_rank()
    gradients = mean_gradients(model, [[0], [1], [2], [3]])
    expected = {name: weight - gradients[name] for name, weight in weights_of(model).items()}
    optimizer = shard(model, stage=stage, zero_size=2, bucket_size=30)
    optimizer.backward(loss_of(model, rank))
    optimizer.step()
    assert_equal(weights_of(model), expected)
    for bucket in optimizer.buckets:
        assert bucket.masters.numel() * 2 == bucket.parameters.numel()
    norm = optimizer.get_grad_norm()
    assert norm == pytest.approx(nn.utils.get_total_norm(gradients.values()).item())
    return norm
