"""Refused calls of the sharded optimizer on two ranks, and words of each message."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..zero.helpers import loss_of, managed, sgd, shard, small_model
from .rows import Row, table

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
        for one in acts:
            one(model, optimizer)

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


def twice(second: Callable[[nn.Sequential], ManagedParameter]) -> Callable[[], Any]:
    def manage() -> None:
        model = small_model()
        parameters, settings = [*managed(model), second(model)], PrecisionConfig()
        ShardedOptimizer(
            sgd(model.parameters()), parameters, mesh=ParallelMesh(), stage=1, precision=settings
        )

    return manage


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


def shared(model: nn.Sequential) -> ManagedParameter:
    return ManagedParameter(name="tied", parameter=model[0].weight)


def recurrent(model: nn.Sequential) -> None:
    model.append(nn.LSTM(3, 4))


def wrapped(model: nn.Sequential) -> None:
    model.add_module("2", torch.compile(model[2], backend="eager"))


CLIP, STALE = "call optimizer.clip_grad_by_norm(max_norm)", "modified by an inplace operation"
STEPPED = ("already has state for 0.weight", "boost before the first step")
LATE = "use overlap_allgather=False"
DROPPED = ("was dropped after booster.backward", "call optimizer.zero_grad")
# fmt: off
ZERO: dict[str, Row] = {
    **table("at boost",
        (lambda: stepped(torch.optim.AdamW), *STEPPED),
        (lambda: stepped(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)), *STEPPED),
        (lambda: stepped(torch.optim.Adagrad), *STEPPED),
        (lambda: shard(small_model(), torch.optim.LBFGS), "LBFGS could not be tried on a matrix"),
        (lambda: shard(nn.ParameterDict({"phase": torch.ones(3, dtype=torch.complex64)})), "phase is torch.complex64"),
        (twice(shared), "0.weight and tied are one parameter"),
        (twice(lambda _: ManagedParameter(name="0.bias", parameter=nn.Parameter(torch.ones(1)))), "both named"),
        (lambda: shard(nn.Sequential(nn.Linear(5, 7, bias=dist.get_rank() == 0))),
            "number 1 is '0.bias (7,) of group 0' on rank(s) [0] and nothing on rank(s) [1]"),
        (different_sums, "the shapes of parameters whose gradients are summed differ"),
        (lambda: overlapped(recurrent), "3 (LSTM) keeps references to parameters in _flat_weights", LATE),
        (lambda: overlapped(wrapped), ": 2 is compiled", LATE),
        (lambda: overlapped(lambda model: model[2].compile(backend="eager")), ": 2 is compiled", LATE),
    ),
    **table("after boost",
        (sparse, "0.weight is torch.sparse_coo", "sparse=False"),
        (after_backward(lambda model, _: model.half(), step), "0.weight is no longer in the memory"),
        (after_backward(lambda model, _: setattr(model[2].weight, "data", torch.zeros(3, 7)), step),
            "2.weight is no longer in the memory", "before boost"),
        (inner_step, "step the one that boost returned"),
        (lambda: shard(small_model()).add_param_group({}), "before boost"),
        (lambda: copy.deepcopy(shard(small_model())), "cannot be copied or pickled"),
        (freeze_and_thaw, "0.bias was frozen at boost"),
        (lambda: shard(small_model()).gradients(), "call reduce_gradients"),
        (lambda: shard(small_model()).clip_grad_by_norm(0.0), "max_norm=0.0: it must be above 0"),
        (lambda: shard(small_model()).clip_grad_by_norm(1.0, norm_type=0), "norm_type=0: it must be above 0"),
        (lambda: shard(small_model()).clip_grad_by_value(-1.0), "clip_value=-1.0: it must be above 0"),
        (late, "booster.no_sync"),
        (lambda: stale(0), STALE), (lambda: stale(2), STALE), (lambda: stale(1, overlap=True), STALE),
    ),
    **table("changed gradients",
        (after_backward(clip(), step), CLIP),
        (after_backward(clip(foreach=True), step, stage=0), CLIP),
        (after_backward(lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3), step), CLIP),
        (after_backward(lambda model, _: model[2].bias.grad.mul_(2), step), CLIP),
        (after_backward(lambda model, _: model[2].bias.grad.mul_(2), backward), CLIP),
        (after_backward(grad_is(lambda _: None), step), "2.weight was dropped"),
        (after_backward(grad_is(lambda x: x * 0.5), step, stage=0), "2.weight was replaced"),
        (after_backward(lambda model, _: model.zero_grad(), step, stage=2), *DROPPED),
        (after_backward(lambda model, _: model.zero_grad(), backward, stage=2), *DROPPED),
    ),
    **table("unequal calls",
        (lambda: on_one_rank(1), "rank 0 in backward(), rank 1 in step()"),
        (lambda: on_one_rank(2), "rank 0 in backward(), rank 1 in step()"),
        (after_backward(lambda _, optimizer: dist.get_rank() or optimizer.zero_grad(), step),
            "rank(s) [0] have no reduced gradients"),
    ),
}
# fmt: on
