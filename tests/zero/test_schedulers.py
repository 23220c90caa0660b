"""Schedulers act on the sharded optimizer, or on the user's inner one, as on a plain optimizer."""

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR, ReduceLROnPlateau
from transformers import get_scheduler

from ..pool import on_ranks
from .helpers import assert_equal, loss_of, shard, small_model, weights_of

STEPS = 4


def linear(optimizer: Optimizer) -> LambdaLR:
    return get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=6)


def one_cycle(optimizer: Optimizer) -> OneCycleLR:  # sets lr and momentum
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=6)


def restarts(optimizer: Optimizer) -> CosineAnnealingWarmRestarts:
    return CosineAnnealingWarmRestarts(optimizer, T_0=2)


SCHEDULES = (linear, one_cycle, restarts)


def adamw(model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    slow = {"params": parameters[2:], "lr": 1e-3, "weight_decay": 0.1}
    return torch.optim.AdamW([{"params": parameters[:2]}, slow], lr=1e-2, eps=1e-5)


def scheduled(model: nn.Sequential, build: Any, built_on: str) -> tuple[Any, Any, Any]:
    """Return the user's optimizer, the sharded one, and a schedule that was built on one of them."""
    inner = adamw(model)
    schedule = build(inner) if built_on == "inner" else None
    sharded = shard(model, lambda _: inner)
    return inner, sharded, schedule or build(sharded)


@pytest.mark.parametrize("built_on", ["inner", "sharded"])
@on_ranks(2)
def test_schedulers_act_as_on_a_plain_optimizer(built_on: Literal["inner", "sharded"]) -> None:
    for build in SCHEDULES:
        model, plain_model = small_model(), small_model()
        plain = adamw(plain_model)
        plain_schedule = build(plain)
        inner, sharded, schedule = scheduled(model, build, built_on)
        assert isinstance(sharded, Optimizer) and sharded.param_groups is inner.param_groups
        for step in range(STEPS):
            plain.zero_grad()
            (loss_of(plain_model, step) + loss_of(plain_model, 100 + step)).mul(0.5).backward()
            plain.step()
            plain_schedule.step()
            sharded.backward(loss_of(model, step + 100 * dist.get_rank()))
            sharded.step()
            schedule.step()
            sharded.zero_grad()
            assert schedule.get_last_lr() == plain_schedule.get_last_lr()
        assert_equal(weights_of(model), weights_of(plain_model), rtol=1e-5, atol=1e-5)


@on_ranks(1)
def test_a_scheduler_does_not_warn_about_a_skipped_first_step() -> None:
    for built_on in ("inner", "sharded"):
        model = small_model()
        _, sharded, schedule = scheduled(model, linear, built_on)
        sharded.backward(loss_of(model, 0) * float("inf"))
        sharded.step()
        schedule.step()  # a warning would be an error
        assert sharded.skipped_steps == 1


@on_ranks(1)
def test_plateau_scheduler_takes_the_sharded_optimizer() -> None:
    model = small_model()
    sharded = shard(model)
    schedule = ReduceLROnPlateau(sharded, patience=0)
    for _ in range(2):
        sharded.backward(loss_of(model, 0))
        sharded.step()
        schedule.step(1.0)
    assert sharded.inner.param_groups[0]["lr"] == pytest.approx(0.1)


@on_ranks(1)
def test_step_hooks_of_either_optimizer_run_once_per_step() -> None:
    model, calls = small_model(), []
    inner = adamw(model)
    inner.register_step_post_hook(lambda *_: calls.append("inner"))
    sharded = shard(model, lambda _: inner)
    sharded.register_step_post_hook(lambda *_: calls.append("sharded"))
    sharded.backward(loss_of(model, 0))
    sharded.step()
    assert calls == ["inner", "sharded"]
