"""Reduction of gradient buckets: its start, order, format and memory."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.zero.bucket import Bucket, GradientState
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter

from ..pool import Pool, on_ranks
from .helpers import assert_equal, loss_of, managed, mean_gradients, shard, small_model

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
ORDER = ["2.bias", "2.weight", "0.bias", "0.weight"]


def watch(optimizer: ShardedOptimizer) -> list[str]:
    """Record events of buckets by their first parameter: + for the start, - for the release of memory."""
    events: list[str] = []
    for bucket in optimizer.buckets:

        def start(bucket: Bucket = bucket) -> None:
            events.append(f"+{bucket.slots[0].managed.name}")
            Bucket.start_reduction(bucket)

        def give_back(bucket: Bucket = bucket) -> None:
            if bucket.shards_gradients and bucket.gradients is not None:
                events.append(f"-{bucket.slots[0].managed.name}")
            Bucket._return_buffer(bucket)

        bucket.start_reduction = start  # type: ignore[method-assign]
        bucket._return_buffer = give_back  # type: ignore[method-assign]
    return events


def started(events: list[str]) -> list[str]:
    return [event[1:] for event in events if event[0] == "+"]


@STAGES
@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_buckets_are_averaged_in_the_order_of_backward_while_it_runs(stage: int, overlap: bool) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage, bucket_size=1, overlap_communication=overlap)
    events = watch(optimizer)
    with optimizer.no_sync(), optimizer.reducer.last_backward():
        optimizer.backward(loss_of(model, rank))
    assert not events and all(parameter.grad is not None for parameter in model.parameters())
    with optimizer.reducer.last_backward():
        optimizer.backward(loss_of(model, rank + 2))
        assert started(events) == (ORDER if overlap or stage == 2 else [])
    in_flight = [bucket.state is GradientState.REDUCING for bucket in optimizer.buckets]
    assert sum(in_flight) == (0 if not overlap else 1 if stage == 2 else 4)
    optimizer.reduce_gradients()
    assert started(events) == ORDER
    assert_equal(optimizer.gradients(), mean_gradients(small_model(), [[0, 2], [1, 3]]))


@STAGES
def test_a_parameter_that_only_one_rank_uses_keeps_the_order(pool: Pool, stage: int) -> None:
    assert pool.run(2, check_unused, stage) == [ORDER] * 2


def check_unused(stage: int) -> list[str]:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage, bucket_size=1)
    events = watch(optimizer)
    with optimizer.reducer.last_backward():
        if rank == 0:
            optimizer.backward(loss_of(model, 0))
        else:
            optimizer.backward(model[2](torch.ones(1, 7)).sum())  # without the first layer
    optimizer.reduce_gradients()
    half = torch.autograd.grad(loss_of(model, 0), model[0].weight)[0] / 2
    torch.testing.assert_close(optimizer.gradients()["0.weight"], half)
    return started(events)


def test_every_backward_of_stage_two_averages_in_the_memory_of_two_buckets(pool: Pool) -> None:
    order = ["+2.bias", "+2.weight", "-2.bias", "+0.bias", "-2.weight", "+0.weight", "-0.bias"]
    assert pool.run(2, check_memory) == [[*order, "-0.weight"] * 3] * 2


def check_memory() -> list[str]:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=2, bucket_size=1)
    events = watch(optimizer)
    for number in range(3):
        optimizer.backward(loss_of(model, rank + 2 * number))
        for parameter in model.parameters():
            with pytest.raises(RuntimeError, match=r"parameter\.grad cannot be read"):
                parameter.grad.norm()  # type: ignore[union-attr]
        if number < 2:  # the last bucket is in flight, until a backward or the reduction needs it
            optimizer.reducer._wait_for_averages()
    optimizer.reduce_gradients()
    longest = max(bucket.parameters.numel() for bucket in optimizer.buckets)
    assert optimizer.held_bytes()["buffers"] == 2 * 4 * longest
    other = shard(small_model(), stage=2, bucket_size=1, overlap_communication=False)
    other.backward(torch.stack([slot.parameter.sum() for slot in other.reducer.slots]).sum())
    assert other.held_bytes()["buffers"] == 4 * longest, "one bucket after the other"
    assert all(bucket.gradients is None for bucket in optimizer.buckets)
    return events


@on_ranks(2)
def test_padding_never_counts() -> None:
    """Buckets borrow memory in which padding has gradients of another bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 16, bias=False), nn.Linear(16, 1, bias=False), nn.Linear(1, 3))
    optimizer = shard(model, stage=2, bucket_size=20)
    for bucket in optimizer.buckets:  # as if left over in the memory
        bucket.borrow_buffer()
        bucket.gradients.fill_(torch.nan)
        bucket._return_buffer()
    optimizer.backward(model(torch.ones(2, 17)).sum())
    optimizer.step()
    assert optimizer.skipped_steps == 0


@on_ranks(4)
def test_buckets_with_a_sum_group_wait_for_the_reduction() -> None:
    mesh, model = ParallelMesh(pp=2), small_model()
    first, *others = managed(model)
    optimizer = shard([replace(first, sum_groups=(mesh.group("pp"),)), *others], mesh=mesh, bucket_size=1)
    with optimizer.reducer.last_backward():
        optimizer.backward(loss_of(model, 2 * mesh.rank("dp") + mesh.rank("pp")))
    in_flight = {
        bucket.slots[0].managed.name: bucket.state is GradientState.REDUCING for bucket in optimizer.buckets
    }
    assert in_flight == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}
    optimizer.reduce_gradients()
    expected = mean_gradients(small_model(), [[0, 1], [2, 3]])
    torch.testing.assert_close(optimizer.gradients()["0.weight"], expected["0.weight"])


@on_ranks(4)
def test_gradients_are_summed_over_every_group_even_if_ranks_have_none() -> None:
    mesh, rank = ParallelMesh(sp=2, tp=2), dist.get_rank()
    both, one, none = (nn.Parameter(torch.zeros(size)) for size in (3, 2, 4))
    tp, sp = mesh.group("tp"), mesh.group("sp")
    members = [
        ManagedParameter(name="both", parameter=both, sum_groups=(tp, sp)),
        ManagedParameter(name="one", parameter=one, sum_groups=(sp,)),
        ManagedParameter(name="none", parameter=none, sum_groups=(tp,)),
    ]
    optimizer = shard(members, mesh=mesh, bucket_size=1)
    if rank < 3:
        both.grad = torch.full((3,), 10.0**rank)
    if rank > 1:
        one.grad = torch.full((2,), 10.0**rank)
    optimizer.reduce_gradients()
    # Ranks 0 and 2, and 1 and 3, differ only in sp.
    expected = {"both": torch.full((3,), 111.0), "one": torch.full((2,), 1000.0 if rank % 2 else 100.0)}
    assert_equal(optimizer.gradients(), expected)
    for _ in range(2):  # a backward after a reduction is summed separately
        optimizer.backward(both.sum() + one.sum())
        optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), {"both": expected["both"] + 8, "one": expected["one"] + 4})


@STAGES
@on_ranks(2)
def test_hooks_added_after_boost_change_gradients_before_the_reduction(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage, bucket_size=1)

    def double(parameter: Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    model[2].weight.register_post_accumulate_grad_hook(double)
    zeroing = model[2].bias.register_hook(lambda gradient: gradient * 0)
    if rank == 0:  # on one rank only: the order of buckets is the same on both
        model[0].bias.register_post_accumulate_grad_hook(lambda _: None)
    optimizer.backward(loss_of(model, rank))
    optimizer.reduce_gradients()
    zeroing.remove()
    expected = mean_gradients(small_model(), [[0], [1]])
    expected["2.weight"] *= 2
    expected["2.bias"] *= 0
    assert_equal(optimizer.gradients(), expected)


@STAGES
@on_ranks(2)
def test_gradients_are_reduced_in_the_requested_format(stage: int) -> None:
    rank, numbers = dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16):
        model, mesh = small_model(), ParallelMesh()
        optimizer = shard(model, stage=stage, mesh=mesh, communication_dtype=dtype)
        with Traffic(mesh) as traffic:
            optimizer.backward(loss_of(model, rank))
            optimizer.reduce_gradients()
        tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        assert_equal(optimizer.gradients(), mean_gradients(model, [[0], [1]]), **tolerance)
        kind = "small reduce_scatter" if stage else "small all_reduce"
        numbers.append(max(count.nbytes for (_, other), count in traffic.counts.items() if other == kind))
    # At stage 0 the flags have the same kind: one float32 for each of four parameters.
    flags = 0 if stage else 4 * 4
    assert numbers[0] - flags == 2 * (numbers[1] - flags)


@on_ranks(1)
def test_gradients_accumulate_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = shard(model, precision="bf16")
    for value in (256.0, 1.0, 1.0):  # 256 + 1 is 256 in bfloat16
        optimizer.backward(model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum())
    assert model.weight.grad is not None and model.weight.grad.item() == 258.0


@on_ranks(2)
def test_two_optimizers_of_one_mesh_step_in_any_order() -> None:
    rank, mesh, models = dist.get_rank(), ParallelMesh(), [small_model(), small_model()]
    optimizers = [shard(model, stage=1, mesh=mesh) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.backward(loss_of(model, rank))
    for optimizer in reversed(optimizers):
        optimizer.reduce_gradients()
        assert_equal(optimizer.gradients(), mean_gradients(small_model(), [[0], [1]]))
