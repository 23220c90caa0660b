"""Gradients that are averaged while the last backward still runs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.bucket import Bucket, GradientState
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from .helpers import assert_equal, loss_of, sgd, shard, small_model
from .test_gradients import mean_gradients

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
WITH_WHOLE_GRADIENTS = pytest.mark.parametrize("stage", [0, 1])


def watch_starts(optimizer: ShardedOptimizer, backward_is_done: list[bool]) -> list[tuple[str, bool]]:
    """The first parameter of every bucket whose average starts, and whether backward was over."""
    starts: list[tuple[str, bool]] = []
    for bucket in optimizer.buckets:

        def start(bucket: Bucket = bucket) -> None:
            starts.append((bucket.slots[0].managed.name, bool(backward_is_done)))
            Bucket.start_reduction(bucket)

        bucket.start_reduction = start  # type: ignore[method-assign]
    return starts


@WITH_WHOLE_GRADIENTS
def test_buckets_are_averaged_in_the_order_of_backward_while_it_runs(pool: Pool, stage: int) -> None:
    starts = pool.run(2, check_starts, stage)
    assert starts == [[(name, False) for name in ("2.bias", "2.weight", "0.bias", "0.weight")]] * 2


def check_starts(stage: int) -> list[tuple[str, bool]]:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2], [1, 3]])
    optimizer = shard(model, stage=stage, bucket_size=1)
    over: list[bool] = []
    starts = watch_starts(optimizer, over)
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, rank))
    assert not starts
    with optimizer.reducer.last_backward(list(model.parameters())):
        optimizer.backward(loss_of(model, rank + 2))
        over.append(True)
    assert [bucket.state is GradientState.REDUCING for bucket in optimizer.buckets] == [True] * 4
    optimizer.reduce_gradients()
    assert len(starts) == 4, "each once"
    assert_equal(optimizer.gradients(), expected)
    return starts


@STAGES
def test_a_parameter_that_only_one_rank_uses_keeps_the_order(pool: Pool, stage: int) -> None:
    first, second = pool.run(2, check_unused, stage)
    assert first == second == ["2.bias", "2.weight", "0.bias", "0.weight"]


def check_unused(stage: int) -> list[str]:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage, bucket_size=1)
    starts = watch_starts(optimizer, [])
    with optimizer.reducer.last_backward(list(model.parameters())):
        if rank == 0:
            optimizer.backward(loss_of(model, 0))
        else:
            optimizer.backward(model[2](torch.ones(1, 7)).sum())  # nothing of the first layer
    optimizer.reduce_gradients()
    found = optimizer.gradients()
    half = torch.autograd.grad(loss_of(model, 0), model[0].weight)[0] / 2
    torch.testing.assert_close(found["0.weight"], half)
    return [name for name, _ in starts]


def test_a_backward_that_comes_too_late_is_refused(pool: Pool) -> None:
    for error in pool.run_failing(2, add_too_late):
        assert isinstance(error, RuntimeError) and "booster.no_sync" in str(error)


def add_too_late() -> None:
    model = small_model()
    optimizer = shard(model)
    with optimizer.reducer.last_backward(list(model.parameters())):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()


@STAGES
def test_later_calls_are_added(pool: Pool, stage: int) -> None:
    pool.run(2, check_later_calls, stage)


def check_later_calls(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2], [1, 3]])
    optimizer = shard(model, stage=stage, bucket_size=40)
    for seed in (rank, rank + 2):
        with optimizer.accumulation_call(), optimizer.reducer.last_backward(list(model.parameters())):
            optimizer.scale_loss(loss_of(model, seed)).backward()
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


@WITH_WHOLE_GRADIENTS
def test_what_the_model_s_own_zero_grad_drops_is_not_added(pool: Pool, stage: int) -> None:
    pool.run(2, check_dropped, stage)


def check_dropped(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[2], [3]])
    optimizer = shard(model, stage=stage, bucket_size=40)
    for seed in (rank, rank + 2):
        model.zero_grad()
        optimizer.backward(loss_of(model, seed))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


def test_nothing_starts_inside_no_sync(pool: Pool) -> None:
    pool.run(2, check_no_sync)


def check_no_sync() -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2], [1, 3]])
    optimizer = shard(model)
    with optimizer.no_sync(), optimizer.reducer.last_backward(list(model.parameters())):
        optimizer.backward(loss_of(model, rank))
    assert not any(bucket.state is GradientState.REDUCING for bucket in optimizer.buckets)
    with optimizer.reducer.last_backward(list(model.parameters())):
        optimizer.backward(loss_of(model, rank + 2))
    assert all(bucket.state is GradientState.REDUCING for bucket in optimizer.buckets)
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


def test_zeroed_while_under_way_leaves_nothing(pool: Pool) -> None:
    pool.run(2, check_zeroed)


def check_zeroed() -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[2], [3]])
    optimizer = shard(model)
    with optimizer.reducer.last_backward(list(model.parameters())):
        loss_of(model, rank).backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, rank + 2))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


def test_what_is_summed_over_another_group_first_waits_for_the_reduction(pool: Pool) -> None:
    pool.run(4, check_tied)


def check_tied() -> None:
    mesh = ParallelMesh(pp=2)
    model, rank = small_model(), dist.get_rank()
    weights: dict[str, Tensor] = mean_gradients(model, [[0, 1], [2, 3]])
    parameters = [
        ManagedParameter(
            name=name,
            parameter=parameter,
            sum_groups=(mesh.group("pp"),) if name == "0.weight" else (),
            counts=True,
        )
        for name, parameter in model.named_parameters()
    ]
    optimizer = ShardedOptimizer(
        sgd(model.parameters()), parameters, mesh=mesh, stage=1, precision=PrecisionConfig(), bucket_size=1
    )
    seed = 2 * mesh.rank("dp") + mesh.rank("pp")
    with optimizer.reducer.last_backward(list(model.parameters())):
        optimizer.backward(loss_of(model, seed))
    started = {
        bucket.slots[0].managed.name: bucket.state is GradientState.REDUCING for bucket in optimizer.buckets
    }
    assert started == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}, rank
    optimizer.reduce_gradients()
    torch.testing.assert_close(optimizer.gradients()["0.weight"], weights["0.weight"])


@STAGES
def test_hooks_that_come_after_boost_change_gradients_before_they_travel(pool: Pool, stage: int) -> None:
    pool.run(2, check_later_hooks, stage)


def check_later_hooks(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0], [1]])
    optimizer = shard(model, stage=stage, bucket_size=1)

    def double(parameter: Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    model[2].weight.register_post_accumulate_grad_hook(double)
    if rank == 0:  # on one rank alone: the order of buckets is the same on both
        model[0].bias.register_post_accumulate_grad_hook(lambda _: None)
    optimizer.backward(loss_of(model, rank))
    optimizer.reduce_gradients()
    expected["2.weight"] *= 2
    assert_equal(optimizer.gradients(), expected)
