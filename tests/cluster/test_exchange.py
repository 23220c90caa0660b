"""Means and gathers by slices, whichever way these go, beside torch's own collectives."""

import os
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import process_memory, slices
from echelon.cluster.exchange import Exchange, exchange_of
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.process_memory import Neighbours
from echelon.cluster.slices import Reading, Sending

from ..pool import Pool

WAYS = pytest.mark.parametrize("reads", [True, False], ids=["read", "sent"])


def make_exchange(reads: bool) -> Exchange:
    """Over the world."""
    assert process_memory._PROCESS_VM_READV is not None
    with nullcontext() if reads else patch.object(process_memory, "_PROCESS_VM_READV", None):
        exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
    assert isinstance(exchange._way, Reading if reads else Sending)
    return exchange


def buffers(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of this rank: shorter than a piece, pieces that do not divide, the same again. Sums are exact."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = [length * dist.get_world_size() for length in (1, 250, 100, 250)]
    return [torch.randint(-9, 9, (length,), generator=generator).to(dtype) for length in lengths]


@WAYS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_and_gathers_are_those_of_torch(
    pool: Pool, ranks: int, dtype: torch.dtype, reads: bool
) -> None:
    if reads and "Sending" in pool.run(ranks, way_found):
        pytest.skip("this machine lets no process read another one's memory")
    pool.run(ranks, check_exchange, dtype, reads)


def way_found() -> str:
    """The name of what this machine can do."""
    return type(slices.find_way(dist.group.WORLD)).__name__


@patch.object(slices, "_PIECE", 100)  # buffers have several pieces, and a shorter last one
def check_exchange(dtype: torch.dtype, reads: bool) -> None:
    exchange, size = make_exchange(reads), dist.get_world_size()
    means = [flat.clone() for flat in buffers(dtype)]
    for flat in means:
        dist.all_reduce(flat)
        flat.div_(size)
    scattered, everywhere = buffers(dtype), buffers(dtype)
    # All are begun before the first is waited for.
    for work in [exchange.reduce_scatter_(flat) for flat in scattered]:
        work.wait()
        work.wait()  # once more does nothing
    for work in [exchange.all_reduce_(flat) for flat in everywhere]:
        work.wait()
    for flat, whole, mean, before in zip(scattered, everywhere, means, buffers(dtype), strict=True):
        assert exchange.own(flat).equal(exchange.own(mean))
        assert whole.equal(mean)
        kept = [rank for rank in range(size) if rank != dist.get_rank()]
        assert all(flat.chunk(size)[rank].equal(before.chunk(size)[rank]) for rank in kept)
    for work in [exchange.all_gather_(flat) for flat in scattered]:
        work.wait()
    assert all(flat.equal(mean) for flat, mean in zip(scattered, means, strict=True))


def test_a_rank_on_another_machine_makes_all_send(pool: Pool) -> None:
    assert pool.run(3, find_way_with_a_stranger) == ["Sending"] * 3


def find_way_with_a_stranger() -> str:
    """The last rank's process number is, to the others, that of the process which started all."""
    if dist.get_rank() == 2:
        process_memory.os = type(
            "elsewhere", (), {"getpid": staticmethod(os.getppid), "strerror": os.strerror}
        )
    try:
        return type(slices.find_way(dist.group.WORLD)).__name__
    finally:
        process_memory.os = os


def test_a_process_that_is_gone_is_told() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConnectionError, match=f"process {child}"):
        Neighbours({1: child}).read(1, 4096, torch.zeros(4))


def test_all_that_use_a_group_share_one_exchange(pool: Pool) -> None:
    pool.run(2, check_shared)


def check_shared() -> None:
    mesh = ParallelMesh()
    exchange = exchange_of(mesh, mesh.group("dp"))
    assert exchange_of(mesh, mesh.group("dp")) is exchange
    assert exchange_of(ParallelMesh(), mesh.group("dp")) is not exchange
    first, second = torch.ones(4), torch.full((4,), 2.0 * dist.get_rank())
    works = [exchange.all_reduce_(first), exchange.all_reduce_(second)]
    for work in reversed(works):
        work.wait()
    assert first.eq(1).all() and second.eq(1).all()
