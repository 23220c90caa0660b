"""What the optimizer refuses, and in which words."""

import gc
import weakref

import pytest
import torch
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from .helpers import assert_equal, loss_of, managed, sgd, shard, small_model, weights_of


def test_an_optimizer_that_stepped_is_refused(pool: Pool) -> None:
    pool.run(1, check_stepped)


def check_stepped() -> None:
    for build in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), torch.optim.Adagrad):
        model = small_model()
        optimizer = build(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()
        with pytest.raises(ValueError, match=r"already has state for 0\.weight.*boost before the first step"):
            shard(model, lambda _, optimizer=optimizer: optimizer)


def test_an_optimizer_that_is_not_elementwise_is_refused(pool: Pool) -> None:
    pool.run(1, check_adafactor)


def check_adafactor() -> None:
    with pytest.raises(ValueError, match="Adafactor is not element-wise"):
        shard(small_model(), torch.optim.Adafactor)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moved_or_retyped_parameters_are_an_error_at_the_step(pool: Pool, precision: str) -> None:
    pool.run(1, check_moved, precision)


def check_moved(precision: str) -> None:
    for move in (
        lambda model: model.half(),
        lambda model: setattr(model[2].weight, "data", model[2].weight.detach().clone()),
    ):
        model = small_model()
        optimizer = shard(model, precision=precision)
        optimizer.backward(loss_of(model, 0))
        move(model)
        with pytest.raises(RuntimeError, match=r"(0|2)\.weight is no longer in the memory.*before boost"):
            optimizer.step()


def test_stepping_the_inner_optimizer_is_an_error(pool: Pool) -> None:
    pool.run(1, check_inner_step)


def check_inner_step() -> None:
    model = small_model()
    inner = sgd(model.parameters())
    shard(model, lambda _: inner)
    with pytest.raises(RuntimeError, match="step the one that boost returned"):
        inner.step()


def test_a_group_added_after_boost_is_refused(pool: Pool) -> None:
    pool.run(1, check_added_group)


def check_added_group() -> None:
    with pytest.raises(RuntimeError, match="before boost"):
        shard(small_model()).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_thawing_a_frozen_parameter_after_boost_is_an_error(pool: Pool) -> None:
    pool.run(1, check_thawed)


def check_thawed() -> None:
    model = small_model()
    model[0].bias.requires_grad_(False)
    optimizer = shard(model)
    model[0].bias.requires_grad_(True)
    optimizer.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match=r"0\.bias was frozen at boost"):
        optimizer.step()


def test_freezing_a_parameter_after_boost_stops_its_updates(pool: Pool) -> None:
    pool.run(2, check_frozen_later)


def check_frozen_later() -> None:
    model = small_model()
    optimizer = shard(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        before = weights_of(model)
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        changed = {
            name for name, weight in weights_of(model).items() if not torch.equal(weight, before[name])
        }
        assert changed == ({"2.weight", "2.bias"} if frozen else set(before))


def test_a_name_or_a_parameter_given_twice_is_refused(pool: Pool) -> None:
    pool.run(1, check_given_twice)


def check_given_twice() -> None:
    model = small_model()
    once = managed(model)
    same_parameter = ManagedParameter(name="tied", parameter=model[0].weight)
    same_name = ManagedParameter(name="0.weight", parameter=nn.Parameter(torch.ones(1)))
    for second, message in (
        (same_parameter, r"0\.weight and tied are one parameter"),
        (same_name, "both named"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardedOptimizer(
                sgd(model.parameters()),
                [*once, second],
                mesh=ParallelMesh(),
                stage=1,
                precision=PrecisionConfig(),
            )


def test_parameters_of_other_stages_leave_the_optimizer(pool: Pool) -> None:
    pool.run(1, check_other_stages)


def check_other_stages() -> None:
    model, elsewhere = small_model(), nn.Linear(2, 2)
    inner = torch.optim.Adagrad(
        [{"params": list(elsewhere.parameters())}, {"params": list(model.parameters())}]
    )
    groups = list(inner.param_groups)
    optimizer = shard(model, lambda _: inner)
    assert all(group is before for group, before in zip(optimizer.param_groups, groups, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 4]
    assert len(optimizer.state) == 4
    before = weights_of(elsewhere)
    optimizer.backward(loss_of(model, 0) + elsewhere(torch.ones(1, 2)).sum())
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(elsewhere).items())


def test_parameters_that_the_optimizer_does_not_hold_are_left_alone(pool: Pool) -> None:
    pool.run(1, check_not_held)


def check_not_held() -> None:
    model = small_model()
    before = weights_of(model)
    inner = sgd(model[2].parameters())
    optimizer = shard(model, lambda _: inner)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    assert set(optimizer.gradients()) == {"2.weight", "2.bias"}
    assert torch.equal(model[0].weight, before["0.weight"]) and model[0].weight.grad is not None


def test_an_optimizer_that_is_let_go_leaves_no_trace(pool: Pool) -> None:
    pool.run(1, check_let_go)


def check_let_go() -> None:
    model = small_model()
    optimizer = shard(model)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    trace = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert trace() is None
    model.zero_grad()
    before = weights_of(model)
    second = shard(model)
    second.backward(loss_of(model, 0))
    second.step()
    gradients = second.gradients()
    assert_equal(weights_of(model), {name: before[name] - gradients[name] for name in before})
