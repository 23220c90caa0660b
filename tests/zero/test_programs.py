"""Sequences of calls on a sharded optimizer, compared with plain torch on the batches of all ranks."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.zero.optimizer import ShardedOptimizer

from ..cluster.helpers import with_slices
from ..pool import Pool
from .helpers import assert_equal, gradients_of, loss_of, shard, small_model, weights_of

MAX_NORM, VALUE, DECAY = 0.125, 0.01, 0.5
# Letters: a backward of the optimizer (b), in `no_sync` (n), there on the first rank only (o), of the second layer (h),
# of other parameters (x), in `last_backward` (l), of plain torch in `accumulate_and_reduce` (c), or without it (p);
# `autograd.grad` on one rank (g); reduce (r), step (s), factor 0.5 (f), clip by value (v) or norm (k), a skipped step
# (i: the last rank's gradient is infinite); zero_grad of the optimizer (z) or to zeros (Z), of the model (m, M).
PROGRAMS: dict[str, tuple[str, tuple[int, ...]]] = {
    "reduced twice": ("brrsr", (0, 1, 2)),
    "added to what is reduced": ("bbrbs", (0, 1, 2)),
    "the later backward has no gradient of some": ("brhs", (0, 1, 2)),
    "left out of the last backward, then zeros": ("bhZs", (0, 1)),
    "left out within no_sync": ("bnszbs", (0, 1, 2)),
    "one rank gave nothing": ("orbs", (0, 1)),
    "a loss of others": ("bxs", (0, 1, 2)),
    "autograd.grad": ("bgs", (0, 1, 2)),
    "no_sync": ("nbs", (0, 1, 2)),
    "no_sync on one rank after an average": ("bors", (2,)),
    "nothing but no_sync": ("nns", (0, 1, 2)),
    "calls": ("lbs", (0, 1, 2)),
    "calls of plain torch": ("ccs", (0, 1, 2)),
    "plain torch": ("ps", (0, 1, 2)),
    "zeroed": ("bzbrzbs", (0, 1, 2)),
    "to zeros": ("bZsbrZbs", (0, 1, 2)),
    "zeroed in flight": ("lzbs", (0, 1, 2)),
    "nothing to step": ("bzs", (0, 1, 2)),
    "zeroed by the model": ("bmbs", (0, 1)),
    "to zeros by the model": ("bMbrs", (0, 1)),
    "zeroed by the model after a step": ("bsmbs", (0, 1, 2)),
    "two steps on one gradient": ("bss", (0, 1, 2)),
    "added after a step": ("bsbs", (0, 1, 2)),
    "a factor for one step": ("bfszbs", (0, 1, 2)),
    "added to what was clipped": ("bvbszbkbs", (0, 1, 2)),
    "clipped by both with a factor": ("bfvks", (0, 1, 2)),
    "skipped": ("iszbs", (0, 1, 2)),
}
# Collectives by slices as over gloo, or torch's own as over NCCL, see gloo.py.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "slices": (True, {}),
    "plain collectives": (False, {"bucket_size": 40}),
    "no overlap": (False, {"overlap_communication": False, "bucket_size": 1}),
    "overlapped all-gather by slices": (True, {"overlap_allgather": True, "bucket_size": 1}),
    "overlapped all-gather": (False, {"overlap_allgather": True, "bucket_size": 40}),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Make an SGD with a learning rate of 1 and weight decay, so a zero gradient differs from none."""
    return torch.optim.SGD(parameters, lr=1.0, weight_decay=DECAY)


class Plain:
    """The mean over ranks of their gradients, in one process."""

    def __init__(self) -> None:
        self.model, self.ranks, self.factor = small_model(), range(dist.get_world_size()), 1.0
        self.skips = False
        self.stepped: dict[str, Tensor] = {}

    def run(self, letter: str, seed: int) -> None:
        """Execute a letter."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.stepped = self.stepped if letter in "rg" else {}
        if letter in "bnolcpih":
            for rank in self.ranks[:1] if letter == "o" else self.ranks:
                (loss_at(self.model, letter, seed + rank) / len(self.ranks)).backward()
            self.skips |= letter == "i"
        elif letter in "zmZM":
            self.model.zero_grad(set_to_none=letter in "zm")
            self.skips = False
        elif letter == "f":
            self.factor = 0.5
        elif letter in "svk":
            for gradient in gradients:
                gradient.mul_(self.factor)
            self.factor = 1.0
            if letter == "v":
                nn.utils.clip_grad_value_(parameters, VALUE)
            elif letter == "k":
                nn.utils.clip_grad_norm_(parameters, MAX_NORM / 2)
            elif not self.skips:
                self.step(parameters)

    def step(self, parameters: list[nn.Parameter]) -> None:
        """Step with clipped gradients, but report the gradients before clipping."""
        before = deepcopy(gradients_of(self.model))
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        sgd(parameters).step()
        self.stepped = before

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients; right after a step, those of the step."""
        return self.stepped or gradients_of(self.model)


def loss_at(model: nn.Sequential, letter: str, seed: int) -> Tensor:
    """Return the loss of a letter."""
    return model[2](torch.full((1, 7), 0.1 * seed)).sum() if letter == "h" else loss_of(model, seed)


def run(optimizer: ShardedOptimizer, model: nn.Sequential, letter: str, seed: int) -> None:
    """Execute a letter on this rank."""
    rank = dist.get_rank()
    calls = {
        "z": optimizer.zero_grad,
        "Z": lambda: optimizer.zero_grad(set_to_none=False),
        "m": model.zero_grad,
        "M": lambda: model.zero_grad(set_to_none=False),
        "r": optimizer.reduce_gradients,
        "s": optimizer.step,
        "v": lambda: optimizer.clip_grad_by_value(VALUE),
        "k": lambda: optimizer.clip_grad_by_norm(MAX_NORM / 2),
        "x": lambda: optimizer.backward(torch.ones(1, requires_grad=True).sum()),
        "p": lambda: loss_at(model, letter, seed + rank).backward(),
        "f": lambda: setattr(optimizer, "gradient_factor", torch.tensor(0.5)),
        "g": lambda: rank == 0 and torch.autograd.grad(loss_of(model, seed), list(model.parameters())),
    }
    if letter in calls:
        calls[letter]()
    elif letter == "c":
        with optimizer.accumulate_and_reduce(), optimizer.reducer.last_backward(list(model.parameters())):
            optimizer.scale_loss(loss_of(model, seed + rank)).backward()
    else:
        last = optimizer.reducer.last_backward(list(model.parameters())) if letter == "l" else nullcontext()
        loss = loss_at(model, letter, seed + rank)
        with optimizer.no_sync() if letter in "no" else last:
            if letter != "o" or rank == 0:
                is_infinite = letter == "i" and rank == dist.get_world_size() - 1
                optimizer.backward(loss * float("inf") if is_infinite else loss)


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        # The quick tests have every stage once, and three of the ways.
        pytest.param(stage, way, marks=() if number == (1, 4, 0)[stage] else pytest.mark.slow)
        for stage in (0, 1, 2)
        for number, way in enumerate(WAYS)
    ],
)
def test_sequences_of_calls_are_those_of_plain_torch(pool: Pool, stage: int, way: str) -> None:
    slices, arguments = WAYS[way]
    pool.run(3 if way == "plain collectives" else 2, with_slices, slices, check_programs, stage, arguments)


def check_programs(stage: int, arguments: dict[str, Any]) -> None:
    for name, (program, stages) in PROGRAMS.items():
        if stage in stages:
            try:
                check_program(program, stage, **arguments)
            except Exception as error:
                raise AssertionError(f"{name} ({program}): {error}") from error


def check_program(program: str, stage: int, *, overlap_allgather: bool = False, **arguments: Any) -> None:
    model, plain = small_model(), Plain()
    optimizer = shard(model, sgd, stage=stage, max_norm=MAX_NORM, **arguments)
    if overlap_allgather:
        optimizer.parameter_gather.overlap_with_forward(model)
    for number, letter in enumerate(program):
        seed = 10 * (number + 1)
        run(optimizer, model, letter, seed)
        plain.run(letter, seed)
        if letter in "rsvk" and not plain.skips:
            assert_equal(optimizer.gradients(), plain.gradients(), rtol=1e-5, atol=1e-6)
    assert optimizer.skipped_steps == program.count("is")
    assert_equal(weights_of(model), weights_of(plain.model), rtol=1e-5, atol=1e-6)
