"""Parameters that leave the optimizer: frozen ones, those of other stages, and those of a released optimizer."""

import gc
import weakref

import torch
from torch import nn

from ..freed import still_alive
from ..pool import on_ranks
from .helpers import assert_equal, loss_of, shard, small_model, weights_of


@on_ranks(2)
def test_freezing_a_parameter_after_boost_stops_its_updates() -> None:
    model = small_model()
    optimizer = shard(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        before = weights_of(model)
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        after = weights_of(model)
        changed = {name for name in before if not after[name].equal(before[name])}
        assert changed == ({"2.weight", "2.bias"} if frozen else set(before))


@on_ranks(1)
def test_parameters_of_other_stages_leave_the_optimizer() -> None:
    model, elsewhere = small_model(), nn.Linear(2, 2)
    groups = [{"params": list(module.parameters())} for module in (elsewhere, model[2])]
    inner = torch.optim.Adagrad(groups, lr=0.1)
    before, groups = {**weights_of(elsewhere), **weights_of(model)}, list(inner.param_groups)
    optimizer = shard(model, lambda _: inner)
    assert all(group is old for group, old in zip(optimizer.param_groups, groups, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
    assert len(optimizer.state) == 2
    optimizer.backward(loss_of(model, 0) + elsewhere(torch.ones(1, 2)).sum())
    optimizer.step()
    assert set(optimizer.gradients()) == {"2.weight", "2.bias"}
    after = {**weights_of(elsewhere), **weights_of(model)}
    assert {name for name in before if not after[name].equal(before[name])} == {"2.weight", "2.bias"}
    assert model[0].weight.grad is not None


@on_ranks(1)
def test_a_released_optimizer_leaves_no_trace() -> None:
    model = small_model()
    optimizer = shard(model)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    trace = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert not still_alive({"optimizer": trace})
    model.zero_grad()
    before = weights_of(model)
    second = shard(model)
    second.backward(loss_of(model, 0))
    second.step()
    gradients = second.gradients()
    assert_equal(weights_of(model), {name: before[name] - gradients[name] for name in before})
