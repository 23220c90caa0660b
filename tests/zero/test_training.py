"""Training equals plain torch: odd sizes, empty slices, groups, and optimizers."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..cluster.helpers import with_slices
from ..pool import Pool, on_ranks
from ..slow import slow_row
from .helpers import assert_equal, assert_same_bits, gradients_of, shard, weights_of

RANKS, STEPS, MICROBATCHES, OVERFLOW_STEP, LR = 4, 4, 3, 1, 1e-2
ADAMW = partial(torch.optim.AdamW, eps=1e-5)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Shapes of a model's parameters; optimizer and groups by their indices; size of a bucket."""

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...] = ()
    bucket_size: int = 10**6
    build: Callable[..., Optimizer] = ADAMW


SHAPES: dict[str, Any] = {"shapes": ((5, 3), (), (7,), (41, 7)), "groups": ((0, 1, 2, 3),)}
CASES = {
    "one element": Odd(shapes=((1,),), groups=((0,),)),
    "no dimension": Odd(shapes=((), (3,)), groups=((0, 1),)),
    "fewer parameters than ranks": Odd(shapes=((1,), (1, 1), (2,)), groups=((0, 1, 2),), bucket_size=1),
    "no element": Odd(shapes=((3, 2), (0, 5), (2,)), groups=((0, 1, 2),)),
    "empty groups": Odd(shapes=((5, 3), (3,)), groups=((), (0,), (), (1,), ())),
    "a group that is frozen": Odd(shapes=((5, 3), (3,), (7,)), groups=((0,), (1,), (2,)), frozen=(1,)),
    "a bucket smaller than a parameter": Odd(
        shapes=((2, 2), (41, 7), (3,)), groups=((0, 1, 2),), bucket_size=5
    ),
    "many slices of one element": Odd(shapes=((1,),) * 9, groups=(tuple(range(9)),)),
    "fused": Odd(**SHAPES, build=partial(ADAMW, fused=True)),
    "momentum": Odd(**SHAPES, build=partial(torch.optim.SGD, momentum=0.9), bucket_size=50),
    "states from the beginning": Odd(
        **SHAPES, build=partial(torch.optim.Adagrad, initial_accumulator_value=0.1)
    ),
}


class Odds(nn.Module):
    """Parameters of any shape, all used; the loss depends on the seed."""

    def __init__(self, case: Odd) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in case.shapes])
        for index in case.frozen:
            self.weights[index].requires_grad_(False)

    def forward(self, seed: int) -> Tensor:
        drawn = torch.Generator().manual_seed(seed)
        parts = [
            (weight * torch.randn(weight.shape, generator=drawn)).sin().sum() + weight.square().sum()
            for weight in self.weights
        ]
        return torch.stack(parts).sum()


def build_optimizer(case: Odd, model: Odds) -> Optimizer:
    """Make an optimizer with its own weight decay and learning rate in every group."""
    groups = []
    for number, indices in enumerate(case.groups):
        parameters = [model.weights[index] for index in indices]
        groups.append({"params": parameters, "lr": LR / (1 + number), "weight_decay": 0.1 * number})
    return case.build(groups, lr=LR)


def seed_of(step: int, rank: int, microbatch: int) -> int:
    return 100 * step + 10 * rank + microbatch


def train_plainly(case: Odd) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    """Train in one process on the batches of all ranks; return gradients and norms by step, and the final weights."""
    model = Odds(case)
    optimizer = build_optimizer(case, model)
    gradients, norms = [], []
    for step in range(STEPS):
        for rank in range(RANKS):
            for microbatch in range(MICROBATCHES):
                (model(seed_of(step, rank, microbatch)) / (RANKS * MICROBATCHES)).backward()
        gradients.append(deepcopy(gradients_of(model)))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        if step != OVERFLOW_STEP:
            optimizer.step()
        optimizer.zero_grad()
    return gradients, norms, weights_of(model)


WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "slices": (True, {}),
    "plain collectives": (False, {}),
    "offloaded": (True, {"cpu_offload": True}),
}
QUICK = [(1, 2, "plain collectives")]
SLOW = [
    (1, -1, "offloaded"),
    (2, -1, "plain collectives"),
    (0, -1, "slices"),
    (1, -1, "slices"),
    (2, 2, "slices"),
    (2, 1, "slices"),
    (2, 2, "offloaded"),
    (0, -1, "offloaded"),
]


@pytest.mark.parametrize(("stage", "zero_size", "way"), [*QUICK, *(slow_row(*row) for row in SLOW)])
def test_odd_sizes_train_as_plain_torch_does(pool: Pool, stage: int, zero_size: int, way: str) -> None:
    slices, arguments = WAYS[way]
    pool.run(RANKS, with_slices, slices, check_cases, {"stage": stage, "zero_size": zero_size, **arguments})


def check_cases(arguments: dict[str, Any]) -> None:
    for name, case in CASES.items():
        try:
            check_case(case, arguments)
        except Exception as error:
            raise AssertionError(f"case {name!r}: {error}") from error


def check_case(case: Odd, arguments: dict[str, Any]) -> None:
    expected, norms, weights = train_plainly(case)
    model, rank = Odds(case), dist.get_rank()
    sizes: dict[str, Any] = {"bucket_size": case.bucket_size, "max_norm": 1.0}
    optimizer = shard(model, lambda _: build_optimizer(case, model), **sizes, **arguments)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = model(seed_of(step, rank, microbatch)) / MICROBATCHES
            overflows = step == OVERFLOW_STEP and rank == RANKS - 1
            optimizer.backward(loss * float("inf") if overflows else loss)
        optimizer.reduce_gradients()
        gradients = optimizer.gradients()
        before = weights_of(model)
        optimizer.step()
        if step == OVERFLOW_STEP:
            assert_same_bits(weights_of(model), before)
        else:
            assert_equal(gradients, expected[step], rtol=1e-5, atol=1e-6)
            assert optimizer.last_norm == pytest.approx(norms[step], rel=1e-5)
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    # The tolerance is for float32 sums in another order, amplified by four steps of AdamW (eps 1e-5).
    assert_equal(weights_of(model), weights, rtol=1e-5, atol=1e-3 * LR)


@on_ranks(2)
def test_a_rank_without_trainable_parameters_steps_too() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    for stage in (0, 1):
        optimizer = shard(model, torch.optim.AdamW, stage=stage, precision="fp16", max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_norm == 0.0 and optimizer.masters() == {}
