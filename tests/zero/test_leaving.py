"""Refusals of the optimizer and their messages; parameters that leave it."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from .helpers import assert_equal, loss_of, managed, sgd, shard, small_model, weights_of

Act = Callable[[nn.Sequential, ShardedOptimizer], Any]


def stepped(build: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = small_model()
    optimizer = build(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    shard(model, lambda _: optimizer)


def after_backward(*acts: Act, **arguments: Any) -> Callable[[], None]:
    """Make a function that applies acts to a model after a backward of its optimizer."""

    def act() -> None:
        model = small_model()
        optimizer = shard(model, **arguments)
        optimizer.backward(loss_of(model, dist.get_rank()))
        for each in acts:
            each(model, optimizer)

    return act


def step(model: nn.Sequential, optimizer: ShardedOptimizer) -> None:
    optimizer.step()


def backward(model: nn.Sequential, optimizer: ShardedOptimizer) -> None:
    optimizer.backward(loss_of(model, 1))


def freeze_and_thaw() -> None:
    model = small_model()
    model[0].bias.requires_grad_(False)
    optimizer = shard(model)
    model[0].bias.requires_grad_(True)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()


def given_twice(second: Callable[[nn.Sequential], ManagedParameter]) -> None:
    model = small_model()
    parameters = [*managed(model), second(model)]
    ShardedOptimizer(
        sgd(model.parameters()), parameters, mesh=ParallelMesh(), stage=1, precision=PrecisionConfig()
    )


def sparse() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    shard(model).backward(model(torch.tensor([1])).sum())


def inner_step() -> None:
    model = small_model()
    inner = sgd(model.parameters())
    shard(model, lambda _: inner)
    inner.step()


def overlapped(change: Callable[[nn.Sequential], Any]) -> None:
    model = small_model()
    change(model)
    shard(model).parameter_gather.overlap_with_forward(model)


def stale(stage: int, *, overlap: bool = False) -> None:
    model = small_model()
    optimizer = shard(model, stage=stage)
    if overlap:
        optimizer.parameter_gather.overlap_with_forward(model)
    first, second = loss_of(model, 0), loss_of(model, 1)
    optimizer.backward(first)
    optimizer.step()
    second.backward()


def late() -> None:
    model = small_model()
    optimizer = shard(model)
    with optimizer.reducer.last_backward(list(model.parameters())):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()


def on_one_rank(stage: int) -> None:
    model = small_model()
    optimizer = shard(model, stage=stage)
    if dist.get_rank() == 0:
        optimizer.backward(loss_of(model, 0))
    optimizer.step()


def grad_is(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Act:
    def act(model: nn.Sequential, _: ShardedOptimizer) -> None:
        model[2].weight.grad = change(model[2].weight.grad)

    return act


def clip(**named: Any) -> Act:
    return lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, **named)


def different_sums() -> None:
    mesh = ParallelMesh(pp=2)
    parameter = nn.Parameter(torch.zeros(3 + dist.get_rank()))
    tied = ManagedParameter(name="tied", parameter=parameter, sum_groups=(mesh.group("pp"),))
    ShardedOptimizer(sgd([parameter]), [tied], mesh=mesh, stage=1, precision=PrecisionConfig())


CLIP = r"call optimizer\.clip_grad_by_norm\(max_norm\)"
BEFORE_STEP = r"already has state for 0\.weight.*boost before the first step"
LATE = "use overlap_allgather=False"
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "stepped AdamW": (lambda: stepped(torch.optim.AdamW), BEFORE_STEP),
    "stepped SGD": (lambda: stepped(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)), BEFORE_STEP),
    "stepped Adagrad": (lambda: stepped(torch.optim.Adagrad), BEFORE_STEP),
    "coupled": (
        lambda: shard(small_model(), torch.optim.LBFGS),
        "LBFGS could not be tried on a matrix",
    ),
    "complex": (
        lambda: shard(nn.ParameterDict({"phase": torch.ones(3, dtype=torch.complex64)})),
        "phase is torch.complex64",
    ),
    "sparse": (sparse, r"0\.weight is torch.sparse_coo.*sparse=False"),
    "half": (after_backward(lambda model, _: model.half(), step), r"0\.weight is no longer in the memory"),
    "moved": (
        after_backward(lambda model, _: setattr(model[2].weight, "data", torch.zeros(3, 7)), step),
        r"2\.weight is no longer in the memory.*before boost",
    ),
    "inner step": (inner_step, "step the one that boost returned"),
    "a group": (lambda: shard(small_model()).add_param_group({}), "before boost"),
    "a copy": (lambda: copy.deepcopy(shard(small_model())), "cannot be copied or pickled"),
    "thawed": (freeze_and_thaw, r"0\.bias was frozen at boost"),
    "a parameter twice": (
        lambda: given_twice(lambda model: ManagedParameter(name="tied", parameter=model[0].weight)),
        r"0\.weight and tied are one parameter",
    ),
    "a name twice": (
        lambda: given_twice(lambda _: ManagedParameter(name="0.bias", parameter=nn.Parameter(torch.ones(1)))),
        "both named",
    ),
    "gradients that are not reduced": (
        lambda: shard(small_model()).gradients(),
        "call reduce_gradients",
    ),
    "max_norm": (lambda: shard(small_model()).clip_grad_by_norm(0.0), "max_norm=0.0: it must be above 0"),
    "norm_type": (
        lambda: shard(small_model()).clip_grad_by_norm(1.0, norm_type=0),
        "norm_type=0: it must be above 0",
    ),
    "clip_value": (
        lambda: shard(small_model()).clip_grad_by_value(-1.0),
        "clip_value=-1.0: it must be above 0",
    ),
    "references to parameters": (
        lambda: overlapped(lambda model: model.append(nn.LSTM(3, 4))),
        rf"3 \(LSTM\) keeps references to parameters in _flat_weights.*{LATE}",
    ),
    "a wrapped compiled module": (
        lambda: overlapped(lambda model: setattr(model, "2", torch.compile(model[2], backend="eager"))),
        f"^2 is compiled.*{LATE}",
    ),
    "a compiled module": (
        lambda: overlapped(lambda model: model[2].compile(backend="eager")),
        f"^2 is compiled.*{LATE}",
    ),
    "a backward too late": (late, r"booster\.no_sync"),
    "an old graph": (lambda: stale(0), "modified by an inplace operation"),
    "an old graph at stage 2": (lambda: stale(2), "modified by an inplace operation"),
    "an old graph in flight": (lambda: stale(1, overlap=True), "modified by an inplace operation"),
    "clipped by torch": (after_backward(clip(), step), CLIP),
    "clipped by torch at once": (after_backward(clip(foreach=True), step, stage=0), CLIP),
    "clipped by value": (
        after_backward(lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3), step),
        CLIP,
    ),
    "one is scaled": (after_backward(lambda model, _: model[2].bias.grad.mul_(2), step), CLIP),
    "one is scaled before a backward": (
        after_backward(lambda model, _: model[2].bias.grad.mul_(2), backward),
        CLIP,
    ),
    "dropped": (after_backward(grad_is(lambda _: None), step), r"2\.weight was dropped"),
    "replaced": (after_backward(grad_is(lambda x: x * 0.5), step, stage=0), r"2\.weight was replaced"),
    "dropped at stage 2": (
        after_backward(lambda model, _: model.zero_grad(), step, stage=2),
        r"was dropped after booster\.backward.*call optimizer\.zero_grad",
    ),
    "dropped at stage 2 before a backward": (
        after_backward(lambda model, _: model.zero_grad(), backward, stage=2),
        r"was dropped after booster\.backward.*call optimizer\.zero_grad",
    ),
    "different parameters": (
        lambda: shard(nn.Sequential(nn.Linear(5, 7, bias=dist.get_rank() == 0))),
        r"number 1 is '0\.bias \(7,\) of group 0' on rank\(s\) \[0\] and nothing on rank\(s\) \[1\]",
    ),
    "different sums": (different_sums, "the shapes of parameters whose gradients are summed differ"),
    "backward on one rank": (lambda: on_one_rank(1), r"rank 0 in backward\(\), rank 1 in step\(\)"),
    "backward on one rank at stage 2": (
        lambda: on_one_rank(2),
        r"rank 0 in backward\(\), rank 1 in step\(\)",
    ),
    "forgotten on one rank": (
        after_backward(lambda _, optimizer: dist.get_rank() or optimizer.zero_grad(), step),
        r"rank\(s\) \[0\] have no reduced gradients",
    ),
}


def test_refusals_give_advice(pool: Pool) -> None:
    for departing in pool.run(2, check_refusals):
        assert not departing, "\n".join(departing)


def check_refusals() -> list[str]:
    departing = []
    for name, (act, needle) in REFUSALS.items():
        try:
            act()
            departing.append(f"{name}: nothing was refused")
        except (ValueError, RuntimeError, TypeError) as error:
            if re.search(needle, str(error)) is None:
                departing.append(f"{name}: {error}")
        dist.barrier()
    return departing


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
        changed = {name for name, each in weights_of(model).items() if not torch.equal(each, before[name])}
        assert changed == ({"2.weight", "2.bias"} if frozen else set(before))


def test_parameters_of_other_stages_leave_the_optimizer(pool: Pool) -> None:
    pool.run(1, check_other_stages)


def check_other_stages() -> None:
    model, elsewhere = small_model(), nn.Linear(2, 2)
    groups = [{"params": list(each.parameters())} for each in (elsewhere, model[2])]
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


def test_a_released_optimizer_leaves_no_trace(pool: Pool) -> None:
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
