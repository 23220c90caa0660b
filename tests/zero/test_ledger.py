"""Bytes of communication and of memory equal the formulas exactly."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.plugins.hybrid_parallel import Ledger

from ..pool import Pool, on_ranks
from ..slow import slow
from .helpers import Precision, shard

PSI = 3 * 64 * 64  # three layers, in buckets of their own: no padding on any number of ranks here
BUCKET = 64 * 64


def train(
    stage: int, precision: Precision, backwards: int, zero_size: int, make: Any = torch.optim.AdamW
) -> tuple[dict[Any, Any], Any]:
    """Return the traffic of one step by axis and kind as (calls, bytes, bytes sent), and the bytes held after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    mesh = ParallelMesh(zero=zero_size)
    optimizer = shard(model, make, stage=stage, precision=precision, bucket_size=BUCKET, mesh=mesh)
    dtype = next(model.parameters()).dtype
    with Ledger(mesh, optimizer) as ledger:
        for number in range(backwards):
            accumulates = stage < 2 and number < backwards - 1
            with optimizer.no_sync() if accumulates else nullcontext():
                optimizer.backward(model(torch.ones(2, 64, dtype=dtype)).float().pow(2).mean())
        optimizer.step()
    assert "all_gather" in ledger.table() or stage == 0
    counts = {
        key: (count.calls, count.nbytes, count.sent)
        for key, count in ledger.traffic.items()
        if not key[1].startswith("small ")
    }
    return counts, dict(ledger.held.items())


@pytest.mark.parametrize("precision", [*slow("fp32"), "bf16"])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_cost_as_much_as_the_formulas_say(
    pool: Pool, ranks: int, backwards: int, precision: Precision
) -> None:
    fraction, width = (ranks - 1) / ranks, 4 if precision == "fp32" else 2
    masters = 0 if precision == "fp32" else 4 * PSI
    reduced, gathered = (4 * PSI, 4 * PSI * fraction), (width * PSI, width * PSI * fraction)
    parameters = {("dp", "all_gather"): (3, *gathered)}
    every_time = (3 * backwards, *(backwards * nbytes for nbytes in reduced))
    for stage, expected_traffic, gradients, buffers, share in (
        (0, {("dp", "all_reduce"): (3, 4 * PSI, 8 * PSI * fraction)}, 4 * PSI, 0, 1),
        (1, {("dp", "reduce_scatter"): (3, *reduced)} | parameters, 4 * PSI, 0, ranks),
        (2, {("dp", "reduce_scatter"): every_time} | parameters, 4 * PSI // ranks, 2 * 4 * BUCKET, ranks),
    ):
        for counts, held in pool.run(ranks, train, stage, precision, backwards, -1):
            assert counts == expected_traffic, stage
            assert held == {
                "parameters": width * PSI,
                "gradients": gradients,
                "buffers": buffers,
                "masters": masters // share,
                "states": 8 * PSI // share,
                "scalars": held["scalars"],
            }


@pytest.mark.parametrize("stage", [1, 2])
def test_a_part_of_the_ranks_averages_its_slice_with_the_others(pool: Pool, stage: int) -> None:
    for counts, held in pool.run(4, train, stage, "fp32", 1, 2):
        assert counts == {
            ("dp", "reduce_scatter"): (3, 4 * PSI, 2 * PSI),
            ("dp", "all_reduce"): (3, 2 * PSI, 2 * PSI),
            ("dp", "all_gather"): (3, 4 * PSI, 2 * PSI),
        }
        assert held["states"] == 4 * PSI


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_owners_cost_as_much_as_the_formulas_say(pool: Pool, precision: Precision) -> None:
    """Each way an entry crosses once, unless its owner has it; a rank sends 1/n of that on average."""
    ranks, width = 2, 4 if precision == "fp32" else 2
    fraction = (ranks - 1) / ranks
    sent, masters, states = 0.0, 0, 0
    for counts, held in pool.run(ranks, train, 1, precision, 1, -1, torch.optim.Muon):
        calls, _, sent_here = counts.pop(("dp", "all_to_all"))
        assert calls == 2
        sent += sent_here
        assert counts == {
            ("dp", "reduce_scatter"): (3, 4 * PSI, 4 * PSI * fraction),
            ("dp", "all_gather"): (3, width * PSI, width * PSI * fraction),
        }
        masters, states = masters + held["masters"], states + held["states"]
    assert sent == (4 + width) * PSI * fraction
    assert masters == states == 4 * PSI


@on_ranks(2)
def test_small_messages_and_transfers_are_distinguished() -> None:
    mesh = ParallelMesh(pp=2)
    group, peer = mesh.group("pp"), 1 - mesh.rank("pp")
    big = torch.ones(2048)
    with Traffic(mesh) as traffic:
        dist.all_reduce(torch.ones(2))
        send = group.send([big], peer, 0)
        group.recv([torch.empty(2048)], peer, 0).wait()
        send.wait()
    counts = {key: (count.calls, count.nbytes, count.sent) for key, count in traffic.counts.items()}
    assert counts.pop(("pp", "send")) == (1, 8192, 8192)
    assert counts.pop(("pp", "recv")) == (1, 8192, 0)
    ((_, kind),) = counts
    assert kind == "small all_reduce" and counts.popitem()[1] == (1, 8, 8.0)
