"""What may happen to gradients that a backward has reduced already, before the step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from echelon.cluster.mesh import ParallelMesh

from ..pool import Pool
from .helpers import assert_equal, loss_of, shard, small_model, weights_of
from .test_gradients import mean_gradients

BELOW_TWO = pytest.mark.parametrize("stage", [0, 1])
CHANGES: dict[str, Callable[[Parameter], Any]] = {
    "dropped": lambda parameter: setattr(parameter, "grad", None),
    "replaced": lambda parameter: setattr(parameter, "grad", parameter.grad * 0.5),  # type: ignore[operator]
}


@BELOW_TWO
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_the_step_would_not_see_is_told(pool: Pool, stage: int, change: str) -> None:
    for error in pool.run_failing(2, change_after_backward, stage, change):
        assert isinstance(error, RuntimeError) and f"2.weight was {change}" in str(error)


def change_after_backward(stage: int, change: str) -> None:
    model = small_model()
    optimizer = shard(model, stage=stage)
    optimizer.backward(loss_of(model, dist.get_rank()))
    CHANGES[change](model[2].weight)
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_of_other_parameters_adds_nothing(pool: Pool, stage: int) -> None:
    pool.run(2, check_loss_of_others, stage)


def check_loss_of_others(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0], [1]])
    for reaches in (False, rank == 0):  # none of the parameters on any rank, then on the second
        optimizer = shard(model, stage=stage)
        optimizer.backward(loss_of(model, rank))
        other = torch.ones(1, requires_grad=True).sum()
        optimizer.backward(0 * loss_of(model, 0) if reaches else other)
        optimizer.reduce_gradients()
        assert_equal(optimizer.gradients(), expected)
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_autograd_grad_on_one_rank_changes_nothing(pool: Pool, stage: int) -> None:
    pool.run(2, check_autograd_grad, stage)


def check_autograd_grad(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0], [1]])
    optimizer = shard(model, stage=stage)
    optimizer.backward(loss_of(model, rank))
    if rank == 0:
        torch.autograd.grad(loss_of(model, 5), list(model.parameters()))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


def test_gradients_forgotten_on_one_rank_alone_are_told(pool: Pool) -> None:
    for error in pool.run_failing(2, forget_on_one_rank):
        assert isinstance(error, RuntimeError) and "rank(s) [0] hold no reduced gradients" in str(error)


def forget_on_one_rank() -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=1)
    optimizer.backward(loss_of(model, rank))
    if rank == 0:
        optimizer.zero_grad()
    optimizer.step()


@BELOW_TWO
@pytest.mark.parametrize("held_back", [False, True])
def test_parameters_that_the_last_backward_left_out_keep_their_gradients(
    pool: Pool, stage: int, held_back: bool
) -> None:
    pool.run(2, check_left_out, stage, held_back)


def check_left_out(stage: int, held_back: bool) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, lambda each: torch.optim.SGD(each, lr=1.0, weight_decay=0.5), stage=stage)
    optimizer.backward(loss_of(model, rank))
    with optimizer.no_sync() if held_back else nullcontext():
        optimizer.backward(model[2](torch.ones(1, 7)).sum())  # nothing of the first layer
    assert held_back or model[0].weight.grad is not None
    optimizer.zero_grad(set_to_none=False)
    before = weights_of(model)
    optimizer.step()
    assert_equal(weights_of(model), {name: 0.5 * weight for name, weight in before.items()})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_graph_from_before_the_step_is_refused_as_in_torch(pool: Pool, stage: int) -> None:
    for error in pool.run_failing(2, backward_through_old_graph, stage):
        assert isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def backward_through_old_graph(stage: int) -> None:
    model = small_model()
    optimizer = shard(model, stage=stage)
    first, second = loss_of(model, 0), loss_of(model, 1)
    optimizer.backward(first)
    optimizer.step()
    optimizer.backward(second)


def test_no_sync_waits_for_nobody_at_stage_two(pool: Pool) -> None:
    pool.run(2, check_no_sync)


def check_no_sync() -> None:
    """After an average, one rank adds to both layers and the other to none."""
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2], [1]])
    optimizer = shard(model, stage=2, bucket_size=1)
    optimizer.backward(loss_of(model, rank))
    with optimizer.no_sync():
        if rank == 0:
            optimizer.backward(loss_of(model, 2))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


def test_two_optimizers_of_one_mesh_step_in_any_order(pool: Pool) -> None:
    pool.run(2, check_two_optimizers)


def check_two_optimizers() -> None:
    rank, mesh = dist.get_rank(), ParallelMesh()
    expected = mean_gradients(small_model(), [[0], [1]])
    models = [small_model(), small_model()]
    optimizers = [shard(model, stage=1, mesh=mesh) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        with optimizer.reducer.last_backward():
            optimizer.backward(loss_of(model, rank))
    for optimizer in reversed(optimizers):
        optimizer.reduce_gradients()
        assert_equal(optimizer.gradients(), expected)


def test_complex_parameters_are_refused(pool: Pool) -> None:
    (error,) = pool.run_failing(1, shard_complex)
    assert isinstance(error, ValueError) and "phase is torch.complex64" in str(error)


def shard_complex() -> None:
    shard(nn.ParameterDict({"phase": torch.ones(3, dtype=torch.complex64)}))
