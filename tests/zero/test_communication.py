"""When gradients travel, and in which format."""

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic

from ..pool import Pool
from .helpers import assert_equal, loss_of, shard, small_model
from .test_gradients import mean_gradients
from .test_last_backward import watch_starts


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_overlap_nothing_travels_during_a_backward_but_at_stage_two(pool: Pool, stage: int) -> None:
    pool.run(2, check_overlap, stage)


def check_overlap(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0], [1]])
    optimizer = shard(model, stage=stage, bucket_size=1, overlap_communication=False)
    starts = watch_starts(optimizer, [])
    with optimizer.last_backward(list(model.parameters())):
        optimizer.backward(loss_of(model, rank))
    assert len(starts) == (4 if stage == 2 else 0)
    assert not any(bucket.is_averaging for bucket in optimizer.buckets)
    if stage == 2:  # one bucket after the other
        assert optimizer.held_bytes().buffers == 4 * max(
            bucket.parameters.numel() for bucket in optimizer.buckets
        )
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_travel_in_the_format_that_is_asked_for(pool: Pool, stage: int) -> None:
    pool.run(2, check_format, stage)


def check_format(stage: int) -> None:
    rank = dist.get_rank()
    expected = mean_gradients(small_model(), [[0, 2], [1, 3]])
    numbers = []
    for dtype in (torch.float32, torch.bfloat16):
        model, mesh = small_model(), ParallelMesh()
        optimizer = shard(model, stage=stage, mesh=mesh, communication_dtype=dtype)
        with Traffic(mesh) as traffic:
            for seed in (rank, rank + 2):
                optimizer.backward(loss_of(model, seed))
            optimizer.reduce_gradients()
        tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        assert_equal(optimizer.gradients(), expected, **tolerance)
        kind = "small reduce_scatter" if stage else "small all_reduce"
        numbers.append(max(count.nbytes for (_, found), count in traffic.counts.items() if found == kind))
    # Stage 0 counts its flags under the same kind: one float32 for each of four parameters.
    flags = 0 if stage else 4 * 4
    assert numbers[0] - flags == 2 * (numbers[1] - flags)
