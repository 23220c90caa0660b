"""Tensors from rank to rank, whichever way they go."""

import gc
import os
import signal
import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import direct, process_memory
from echelon.cluster.direct import Direct, _Reading, _Sending, direct_ways
from echelon.cluster.faults import _default_store
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.rank_failure import BROKEN
from echelon.cluster.traffic import Traffic

from ..pool import Pool

WAYS = pytest.mark.parametrize("reads", [True, False], ids=["read", "sent"])


def make_ways(mesh: ParallelMesh, reads: bool, count: int = 1) -> list[Direct]:
    with nullcontext() if reads else patch.object(process_memory, "_PROCESS_VM_READV", None):
        ways = direct_ways(mesh, count)
    assert all(isinstance(way, _Reading if reads else _Sending) for way in ways)
    return ways


def pipeline() -> tuple[ParallelMesh, int]:
    """A mesh whose ranks are all stages, and this rank among them."""
    mesh = ParallelMesh(pp=dist.get_world_size())
    return mesh, mesh.rank("pp")


def values(rank: int, way: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * way + number)
    return torch.randn(7 * number + 1, 2, generator=generator)


@WAYS
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_way_between_two_ranks_keeps_its_own_order(pool: Pool, ranks: int, reads: bool) -> None:
    pool.run(ranks, check_order, reads)


@patch.object(direct, "_LARGE", 64)  # some tensors are large, and some are not
def check_order(reads: bool) -> None:
    """All ranks send to all others on all ways at once, and wait for the last ones first."""
    mesh, own = pipeline()
    ways = make_ways(mesh, reads, 3)
    others = [rank for rank in range(mesh.size("pp")) if rank != own]
    sent, kept, received = [], [], []
    for number in range(5):
        for kind, way in enumerate(ways):
            for rank in others:
                kept.append(values(own, kind, number))
                sent.append(way.send(kept[-1], rank))
                into = torch.empty_like(values(rank, kind, number))
                received.append((way.receive(into, rank), into, values(rank, kind, number)))
    order = reversed(received) if reads else received  # gloo takes what it waits for as the next that came
    for work, into, expected in order:
        work.wait()
        if reads:
            work.wait()  # once more does nothing
        assert into.equal(expected)
    for departure in sent[1::2] + sent:
        departure.wait_until_expected()
        departure.wait()
        assert departure.is_done
    assert not reads or not any(ways[0]._neighbours.messages._heard.values()), "nothing is kept for ever"  # type: ignore[attr-defined]


@WAYS
def test_a_send_ends_only_when_the_tensor_may_be_changed(pool: Pool, reads: bool) -> None:
    pool.run(2, check_changes, reads)


def check_changes(reads: bool) -> None:
    mesh, own = pipeline()
    (way,) = make_ways(mesh, reads)
    tensor = torch.full((2**18,), 5.0 if own == 0 else 0.0)
    if own == 0:
        way.send(tensor, 1).wait()
        tensor.fill_(-1)
        return
    time.sleep(0.3)
    arrival = way.receive(tensor, 0)
    time.sleep(0.3)
    arrival.wait()
    assert tensor.eq(5).all()


@WAYS
def test_a_large_tensor_is_expected_once_its_receiver_has_begun_which_may_then_wait_elsewhere(
    pool: Pool, reads: bool
) -> None:
    pool.run(2, check_expected, reads, timeout=30)


def check_expected(reads: bool) -> None:
    mesh, own = pipeline()
    (way,), store = make_ways(mesh, reads), _default_store()
    assert store is not None
    tensor = torch.full((direct._LARGE // 4,), 5.0 if own == 0 else 0.0)
    if own == 0:
        departure = way.send(tensor, 1)
        assert not departure.is_done
        departure.wait_until_expected()
        assert store.check(["expected soon"])
        dist.barrier()
        departure.wait()
        return
    time.sleep(0.3)
    store.set("expected soon", "")
    arrival = way.receive(tensor, 0)
    dist.barrier()
    arrival.wait()
    assert tensor.eq(5).all()


def test_a_small_tensor_is_held_back_by_nobody(pool: Pool) -> None:
    pool.run(2, check_small, timeout=30)


def check_small() -> None:
    mesh, own = pipeline()
    (way,) = make_ways(mesh, True)
    if own == 0:
        departure = way.send(torch.ones(direct._LARGE // 4 - 1), 1)
        departure.wait_until_expected()
    dist.barrier()
    if own == 1:
        way.receive(torch.empty(direct._LARGE // 4 - 1), 0).wait()
    else:
        departure.wait()


def test_another_size_than_is_expected_is_told(pool: Pool) -> None:
    sender, receiver = pool.run_failing(2, send_another_size)
    assert "rank 0 of the group sends 12 bytes where 8 are expected" in str(receiver)
    assert isinstance(sender, RuntimeError) and BROKEN.search(str(sender)), "it does not wait for ever"


def send_another_size() -> None:
    mesh, own = pipeline()
    (way,) = make_ways(mesh, True)
    if own == 0:
        way.send(torch.ones(3), 1).wait()
    else:
        way.receive(torch.ones(2), 0).wait()


@WAYS
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_is_noticed_by_who_waits_for_it(pool: Pool, reads: bool, dying: int) -> None:
    start = time.monotonic()
    error = pool.run_failing(2, die, reads, dying)[1 - dying]
    assert isinstance(error, RuntimeError) and BROKEN.search(str(error)), error
    assert time.monotonic() - start < 20


def die(reads: bool, dying: int) -> None:
    mesh, own = pipeline()
    (way,) = make_ways(mesh, reads)
    tensor = torch.ones(direct._LARGE)
    for count in range(2):
        if own == dying and count == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        work = way.send(tensor, 1) if own == 0 else way.receive(tensor, 0)
        work.wait()


def test_a_tensor_of_a_rank_that_was_killed_is_not_taken_for_one(pool: Pool) -> None:
    """It was told of, and is gone."""
    error = pool.run_failing(2, die_before_it_is_read)[1]
    assert isinstance(error, RuntimeError) and BROKEN.search(str(error)), error


def die_before_it_is_read() -> None:
    mesh, own = pipeline()
    (way,) = make_ways(mesh, True)
    if own == 0:
        way.send(torch.ones(3), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    way.receive(torch.ones(3), 0).wait()


def test_who_closes_a_way_is_waited_for_no_more(pool: Pool) -> None:
    pool.run(2, check_closed, timeout=30)


def check_closed() -> None:
    mesh, own = pipeline()
    ways = make_ways(mesh, True, 2)
    tensor = torch.full((3,), 1.0 + own)
    if own == 0:
        ways[0].send(tensor, 1)
        ways[1].close()
    else:
        ways[0].receive(tensor, 0).wait()
        assert tensor.eq(1).all(), "what was sent before arrives"
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            ways[0].receive(tensor, 0).wait()
    dist.barrier()


def test_ways_that_follow_each_other_do_not_mix(pool: Pool) -> None:
    pool.run(2, check_two)


def check_two() -> None:
    """What the first one leaves under way does not come out of the second."""
    mesh, own = pipeline()
    (first,) = make_ways(mesh, True)
    wrong, right, into = torch.full((3,), -1.0), torch.full((3,), float(own)), torch.empty(3)
    first.send(wrong, 1 - own)
    (second,) = make_ways(mesh, True)
    del first
    gc.collect()
    departure, arrival = second.send(right, 1 - own), second.receive(into, 1 - own)
    arrival.wait()
    departure.wait()
    assert into.eq(1 - own).all()


def test_one_pipeline_of_several_that_cannot_read_makes_all_send(pool: Pool) -> None:
    assert pool.run(4, ways_beside_one_that_cannot_read) == ["_Sending"] * 4


def ways_beside_one_that_cannot_read() -> str:
    mesh = ParallelMesh(pp=2)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:
            patched.setattr(process_memory, "_PROCESS_VM_READV", None)
        return type(direct_ways(mesh, 1)[0]).__name__


def test_the_ledger_counts_the_same_whichever_way_tensors_go(pool: Pool) -> None:
    read, sent = (pool.run(2, ledger, reads) for reads in (True, False))
    assert read == sent
    assert read[0] == {("pp", "send"): (2, 16000, 16000.0), ("pp", "small recv"): (1, 8, 0.0)}


def ledger(reads: bool) -> dict[tuple[str, str], tuple[int, int, float]]:
    mesh, own = pipeline()
    (way,) = make_ways(mesh, reads)
    large, small = [torch.ones(2000) for _ in range(2)], torch.ones(2)
    with Traffic(mesh) as traffic:
        for tensor in large:
            (way.send(tensor, 1) if own == 0 else way.receive(tensor, 0)).wait()
        (way.send(small, 0) if own == 1 else way.receive(small, 1)).wait()
    return {key: (count.calls, count.nbytes, count.sent) for key, count in traffic.counts.items()}
