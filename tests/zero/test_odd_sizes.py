"""Parameters, groups and buckets of odd sizes train as in plain torch: one rank's share may be nothing at all."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..pool import Pool
from .helpers import assert_equal, shard
from .reference import Record

RANKS = 4
STEPS = 4
OVERFLOW_STEP = 1
MICROBATCHES = 3
LR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Odd:
    """The shapes of a model's parameters; the optimizer's groups by their indices; the bucket's size."""

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...] = ()
    bucket_size: int = 10**6


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
}


class Odds(nn.Module):
    """Parameters of any shape, all used; the loss differs with the seed."""

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


def build_optimizer(case: Odd, model: Odds) -> torch.optim.Optimizer:
    """Every group with its own weight decay and learning rate."""
    groups = [
        {
            "params": [model.weights[index] for index in members],
            "lr": LR / (1 + number),
            "weight_decay": 0.1 * number,
        }
        for number, members in enumerate(case.groups)
    ]
    return torch.optim.AdamW(groups, eps=1e-5)


def seed_of(step: int, rank: int, microbatch: int) -> int:
    return 100 * step + 10 * rank + microbatch


def train_plainly(case: Odd) -> Record:
    """One process in the place of all ranks; a step whose gradients are not finite is left out."""
    model = Odds(case)
    optimizer = build_optimizer(case, model)
    record = Record()
    for step in range(STEPS):
        for rank in range(RANKS):
            for microbatch in range(MICROBATCHES):
                (model(seed_of(step, rank, microbatch)) / (RANKS * MICROBATCHES)).backward()
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        record.gradients.append(
            {name: each.grad.clone() for name, each in named.items() if each.grad is not None}
        )
        norm = nn.utils.clip_grad_norm_(named.values(), 1.0)
        record.norms.append(norm.item())
        if step != OVERFLOW_STEP:
            optimizer.step()
        optimizer.zero_grad()
    record.weights = {name: each.detach() for name, each in model.named_parameters()}
    return record


QUICK = [(0, -1), (1, 2), (2, -1)]
SLOW = [pytest.param(*layout, marks=pytest.mark.slow) for layout in ((1, -1), (2, 2), (2, 1))]


@pytest.mark.parametrize(("stage", "zero_size"), [*QUICK, *SLOW])
def test_odd_sizes_train_as_plain_torch_does(pool: Pool, stage: int, zero_size: int) -> None:
    pool.run(RANKS, check_cases, stage, zero_size)


def check_cases(stage: int, zero_size: int) -> None:
    for name, case in CASES.items():
        try:
            check_case(case, stage=stage, zero_size=zero_size)
        except Exception as error:
            raise AssertionError(f"case {name!r}: {error}") from error


def check_case(case: Odd, *, stage: int, zero_size: int) -> None:
    expected = train_plainly(case)
    model, rank = Odds(case), dist.get_rank()
    optimizer = shard(
        model,
        lambda _: build_optimizer(case, model),
        stage=stage,
        zero_size=zero_size,
        bucket_size=case.bucket_size,
        max_norm=1.0,
    )
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = model(seed_of(step, rank, microbatch)) / MICROBATCHES
            overflows = step == OVERFLOW_STEP and rank == RANKS - 1
            optimizer.backward(loss * float("inf") if overflows else loss)
        optimizer.reduce_gradients()
        gradients = optimizer.gradients()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        optimizer.step()
        if step == OVERFLOW_STEP:
            assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
        else:
            assert_equal(gradients, expected.gradients[step], rtol=1e-5, atol=1e-6)
            assert optimizer.last_norm == pytest.approx(expected.norms[step], rel=1e-5)
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    for name, parameter in model.named_parameters():
        # float32 sums in another order, and what AdamW (eps 1e-5) makes of them in four steps.
        torch.testing.assert_close(
            parameter.detach(), expected.weights[name], rtol=1e-5, atol=1e-3 * LR, msg=name
        )


def test_a_number_is_trained_by_an_optimizer_that_begins_with_state(pool: Pool) -> None:
    pool.run(2, check_number)


def check_number() -> None:
    """Adagrad makes its sums when it is built, as numbers for a parameter that is one."""
    scale, native = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(2.0))
    model = nn.ParameterDict({"scale": scale})
    optimizer = shard(model, torch.optim.Adagrad)
    plain = torch.optim.Adagrad([native])
    for _ in range(3):
        optimizer.backward(scale.square())
        optimizer.step()
        optimizer.zero_grad()
        native.grad = None
        native.square().backward()
        plain.step()
    assert torch.equal(scale, native)
