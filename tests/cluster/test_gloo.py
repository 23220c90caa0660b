"""Reduce-scatter and all-gather, by slices and by torch's own collectives."""

import gc
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster import gloo
from echelon.cluster.collectives import begin_all_gather, begin_reduce_scatter
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic

from ..pool import Pool
from .helpers import SLICES, with_slices


def buffers(dtype: torch.dtype, rank: int | None = None) -> list[Tensor]:
    """Return buffers of a rank: shorter than one slice of the sum, several slices, the same again. Sums are exact."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    lengths = [length * dist.get_world_size() for length in (1, 250, 100, 250)]
    return [torch.randint(-9, 9, (length,), generator=generator).to(dtype) for length in lengths]


def sums(dtype: torch.dtype) -> list[Tensor]:
    every = [buffers(dtype, rank) for rank in range(dist.get_world_size())]
    return [torch.stack(of_ranks).float().sum(0).to(dtype) for of_ranks in zip(*every, strict=True)]


@SLICES
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_and_gathers_are_those_of_the_whole_buffers(
    pool: Pool, ranks: int, dtype: torch.dtype, slices: bool
) -> None:
    pool.run(ranks, with_slices, slices, check_collectives, dtype)


@patch.object(gloo, "_CHUNK", 100)  # buffers have several chunks, and a shorter last one
def check_collectives(dtype: torch.dtype) -> None:
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    inputs, expected = buffers(dtype), sums(dtype)
    slices = [torch.empty_like(flat.chunk(size)[rank]) for flat in inputs]
    # All are begun before the first is waited for.
    works = [begin_reduce_scatter(local, flat, world) for local, flat in zip(slices, inputs, strict=True)]
    for work in works:
        work.wait()
    assert all(local.equal(total.chunk(size)[rank]) for local, total in zip(slices, expected, strict=True))
    assert all(flat.equal(before) for flat, before in zip(inputs, buffers(dtype), strict=True)), "stay"
    gathered = [torch.full_like(flat, -1) for flat in inputs]
    works = [begin_all_gather(buffer, local, world) for buffer, local in zip(gathered, slices, strict=True)]
    for work in reversed(works):
        work.wait()
    assert all(buffer.equal(sum_) for buffer, sum_ in zip(gathered, expected, strict=True))


@SLICES
def test_a_rank_that_waited_may_write_while_another_has_not(pool: Pool, slices: bool) -> None:
    pool.run(3, with_slices, slices, check_writes)


def check_writes() -> None:
    """As over NCCL: what began on all ranks ends for each of them alone. The last rank waits late."""
    world, rank, length = dist.group.WORLD, dist.get_rank(), 3 * 2**16
    gathered, flat, summed = torch.zeros(length), torch.full((length,), 1.0 + rank), torch.empty(length // 3)
    gathering = begin_all_gather(gathered, torch.full((length // 3,), float(rank)), world)
    summing = begin_reduce_scatter(summed, flat, world)
    if rank == 2:
        dist.barrier()
        time.sleep(0.1)
    gathering.wait()
    summing.wait()
    assert [int(chunk[0]) for chunk in gathered.chunk(3)] == [0, 1, 2]
    assert all(chunk.eq(chunk[0]).all() for chunk in gathered.chunk(3)) and summed.eq(6).all()
    gathered.fill_(-1)
    flat.fill_(-1)
    if rank != 2:
        dist.barrier()


@SLICES
def test_what_one_rank_never_waits_for_reaches_the_others(pool: Pool, slices: bool) -> None:
    pool.run(2, with_slices, slices, check_dropped)


def check_dropped() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    for _ in range(2):
        gathered, local, flat = torch.zeros(2**17), torch.full((2**16,), 1.0 + rank), torch.ones(2**17)
        works = [begin_all_gather(gathered, local, world), begin_reduce_scatter(local.clone(), flat, world)]
        if rank == 0:
            del gathered, local, flat, works
            gc.collect()
            continue
        time.sleep(0.1)
        for work in works:
            work.wait()
        assert gathered[0] == 1 and gathered[-1] == 2


def test_traffic_counts_the_same_whichever_way_buffers_go(pool: Pool) -> None:
    by_slices, plain = (pool.run(2, with_slices, slices, count) for slices in (True, False))
    assert by_slices == plain
    assert plain[0] == {("dp", "all_gather"): (1, 8000, 4000.0), ("dp", "reduce_scatter"): (1, 8000, 4000.0)}


def count() -> dict[tuple[str, str], tuple[int, int, float]]:
    mesh = ParallelMesh()
    buffer, local = torch.ones(2000), torch.ones(1000)
    with Traffic(mesh) as traffic:
        begin_all_gather(buffer, local, mesh.group("dp")).wait()
        begin_reduce_scatter(local, buffer, mesh.group("dp")).wait()
    return {key: (count.calls, count.nbytes, count.sent) for key, count in traffic.counts.items()}
