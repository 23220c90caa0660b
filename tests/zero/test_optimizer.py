"""The optimizer trains as plain torch does, under every layout and precision."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from .reference import (
    CASES,
    LR,
    SCALE,
    Case,
    Record,
    build_model,
    build_optimizer,
    build_schedule,
    loss_of,
    train,
)

LAYOUTS = [
    *((1, 0, -1), (2, 0, -1), (2, 1, -1), (3, 1, -1)),  # data-parallel ranks, stage, zero_size
    *(
        pytest.param(*layout, marks=pytest.mark.slow)
        for layout in ((2, 2, -1), (3, 2, -1), (4, 1, 2), (4, 2, 2))
    ),
]


@pytest.mark.parametrize(("world_size", "stage", "zero_size"), LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_equals_plain_torch(
    pool: Pool, world_size: int, stage: int, zero_size: int, precision: str
) -> None:
    pool.run(world_size, check_training, stage, zero_size, precision)


def check_training(stage: int, zero_size: int, precision: str) -> None:
    for name, case in CASES.items():
        try:
            check_case(case, stage=stage, zero_size=zero_size, precision=precision)
        except Exception as error:
            raise AssertionError(f"case {name!r}: {error}") from error


def check_case(case: Case, *, stage: int, precision: str, **arguments: Any) -> None:
    world_size, last = dist.get_world_size(), dist.get_world_size() - 1
    expected = train(case, world_size=world_size, precision=precision, overflowing_rank=last)
    record = train_sharded(case, stage=stage, precision=precision, overflowing_rank=last, **arguments)
    assert record.skipped == expected.skipped == (case.overflow_step is not None)
    for step, (ours, theirs) in enumerate(zip(record.gradients, expected.gradients, strict=True)):
        if step != case.overflow_step:
            assert record.norms[step] == pytest.approx(expected.norms[step], rel=1e-4), f"norm of step {step}"
            require_equal_gradients(ours, theirs, step=step, precision=precision)
    frozen = {"embedding.weight", "inner.bias"} if case.frozen else set()
    assert set(record.weights) == set(expected.weights) - frozen
    # A float32 sum in another order; through AdamW, whose step is lr * m / (sqrt(v) + 1e-5), that much of lr.
    # In 16 bits a last bit may round the other way and change the next gradients by some of it.
    of_lr = 1e-3 if precision == "fp32" else 2e-2
    for name, weight in record.weights.items():
        tolerance = 1e-5 * expected.weights[name].abs().max().item() + of_lr * LR
        torch.testing.assert_close(
            weight,
            expected.weights[name],
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def train_sharded(
    case: Case, *, stage: int, precision: str, overflowing_rank: int, **arguments: Any
) -> Record:
    mesh = ParallelMesh()
    model = build_model(case)
    inner = build_optimizer(case, dict(model.named_parameters()))
    schedule = build_schedule(inner) if case.scheduled else None
    config = PrecisionConfig(precision=precision, initial_scale=SCALE, hysteresis=1)
    optimizer = ShardedOptimizer(
        inner,
        [ManagedParameter(name=name, parameter=each) for name, each in model.named_parameters()],
        mesh=mesh,
        stage=stage,
        precision=config,
        max_norm=case.max_norm,
        norm_type=case.norm_type,
        bucket_size=case.bucket_size,
        **arguments,
    )
    model.to(config.dtype)  # the frozen ones; the others are in it already
    record, rank = Record(), dist.get_rank()
    for step in range(case.steps):
        for microbatch in range(case.microbatches):
            loss = loss_of(model, case, step=step, rank=rank, microbatch=microbatch)
            if step == case.overflow_step and rank == overflowing_rank:
                loss = loss * float("inf")
            optimizer.backward(loss)
        optimizer.reduce_gradients()
        record.gradients.append(optimizer.gradients())
        optimizer.step()
        record.norms.append(optimizer.get_grad_norm())
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    record.weights, record.skipped = optimizer.masters(), optimizer.skipped_steps
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, record.weights[name].to(config.dtype)), name
    return record


def require_equal_gradients(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], *, step: int, precision: str
) -> None:
    assert set(ours) == set(theirs), f"step {step}: gradients of {set(ours) ^ set(theirs)}"
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    # float32: sums in another order, of terms that may be as large as the largest and cancel. 16 bits: a weight
    # that rounds the other way moves gradients by its last bit.
    relative, of_largest = (1e-5, 1e-6) if precision == "fp32" or step == 0 else (1e-3, 1e-3)
    for name, gradient in theirs.items():
        tolerance = relative * gradient.abs().max().item() + of_largest * largest
        torch.testing.assert_close(
            ours[name],
            gradient,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}, {step}: {text}",
        )
