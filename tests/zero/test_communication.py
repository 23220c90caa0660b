"""When gradients travel, and in which format."""

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.zero.bucket import GradientState

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
    with optimizer.reducer.last_backward(list(model.parameters())):
        optimizer.backward(loss_of(model, rank))
    assert len(starts) == (4 if stage == 2 else 0)
    assert not any(bucket.state is GradientState.REDUCING for bucket in optimizer.buckets)
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
            with optimizer.no_sync():
                optimizer.backward(loss_of(model, rank))
            optimizer.backward(loss_of(model, rank + 2))
            optimizer.reduce_gradients()
        tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        assert_equal(optimizer.gradients(), expected, **tolerance)
        kind = "small reduce_scatter" if stage else "small all_reduce"
        numbers.append(max(count.nbytes for (_, found), count in traffic.counts.items() if found == kind))
    # Stage 0 counts its flags under the same kind: one float32 for each of four parameters.
    flags = 0 if stage else 4 * 4
    assert numbers[0] - flags == 2 * (numbers[1] - flags)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_call_backward_unequally_often_are_told(pool: Pool, stage: int) -> None:
    for error in pool.run_failing(2, backward_on_one_rank, stage):
        assert "rank 0 in backward(), rank 1 in step()" in str(error)


def backward_on_one_rank(stage: int) -> None:
    model = small_model()
    optimizer = shard(model, stage=stage)
    if dist.get_rank() == 0:
        optimizer.backward(loss_of(model, 0))
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_backward_leaves_reduced_gradients_but_inside_no_sync(pool: Pool, stage: int) -> None:
    pool.run(2, check_reduced, stage)


def check_reduced(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2], [1, 3]])
    optimizer = shard(model, stage=stage)
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, rank))
    with pytest.raises(RuntimeError, match="reduce_gradients"):
        optimizer.gradients()
    optimizer.backward(loss_of(model, rank + 2))
    assert_equal(optimizer.gradients(), expected)
    if stage == 0:
        assert_equal({name: weight.grad for name, weight in model.named_parameters()}, expected)
