"""Sums that ranks read from each other's memory."""

import gc
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import process_memory, read_sums
from echelon.cluster.collectives import all_reduce, begin_all_reduce, copy_to
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


def test_a_group_that_one_rank_drops_is_read_to_the_end_by_the_others(pool: Pool) -> None:
    pool.run(2, check_dropped)


def check_dropped() -> None:
    """The second rank has begun the sum, and reads it when the first one has forgotten the group."""
    group = dist.new_group([0, 1])
    under_way = begin_all_reduce(torch.full((2**18,), 1.0 + dist.get_rank()), group)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    total = under_way()
    dist.destroy_process_group(group)
    del group, under_way
    gc.collect()
    rest = [torch.full((2**18,), -1e9) for _ in range(8)]  # where the memory was, if it is free
    assert (total == 3).all()
    assert len(rest) == 8


SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from echelon.cluster.collectives import all_reduce, begin_all_reduce
from echelon.cluster.launch import launch_from_torch

launch_from_torch(backend="gloo")
own = torch.full((2**18,), 1.0 + dist.get_rank())
all_reduce(own, dist.group.WORLD)
under_way = begin_all_reduce(own, dist.group.WORLD)
if dist.get_rank() == 0:
    time.sleep(2)
print(under_way().unique().tolist())
"""


@pytest.mark.slow
def test_a_process_ends_when_the_others_have_read_its_last_sum(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        told = [process.communicate(timeout=100) for process in processes]
    assert told == [("[3.0]\n", "")] * 2
