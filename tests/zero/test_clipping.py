"""Gradients that the user clips between backward and step, beside torch's own clipping in one process."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from .helpers import Precision, assert_equal, loss_of, sgd, shard, small_model, weights_of
from .test_gradients import mean_gradients

STAGES = (0, 1, 2)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def by_norm(clip: Any) -> float:
    return float(clip.clip_grad_by_norm(0.05))


def by_largest(clip: Any) -> float:
    return float(clip.clip_grad_by_norm(0.02, norm_type=math.inf, error_if_nonfinite=True))


def by_value(clip: Any) -> None:
    clip.clip_grad_by_value(0.02)


def by_both(clip: Any) -> float:
    by_value(clip)
    return by_norm(clip)


class Plain:
    """torch's clipping, under the names of the optimizer's."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters

    def clip_grad_by_norm(self, *arguments: Any, **named: Any) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, *arguments, **named)

    def clip_grad_by_value(self, value: float) -> None:
        nn.utils.clip_grad_value_(self.parameters, value)


CLIPPINGS: tuple[Callable[[Any], float | None], ...] = (by_norm, by_largest, by_value, by_both)


def test_clipping_is_torchs_of_the_true_gradients(pool: Pool) -> None:
    pool.run(2, check_clippings)


def check_clippings() -> None:
    for precision in PRECISIONS:
        for stage in STAGES:
            for clip in CLIPPINGS:
                for factor in (None, 0.5):
                    check_clipping(clip, stage, precision, factor)


def check_clipping(
    clip: Callable[[Any], float | None], stage: int, precision: Precision, factor: float | None
) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage, precision=precision)
    gradients = mean_gradients(model, [[0], [1]])
    expected = [Parameter(master) for master in optimizer.masters().values()]
    for parameter, name in zip(expected, gradients, strict=True):
        parameter.grad = gradients[name].float() * (factor or 1.0)
    norm = nn.utils.clip_grad_norm_(expected, math.inf).item()
    found, theirs = train_step(model, optimizer, rank, factor, clip), clip(Plain(expected))
    # 16 bits round gradients to 2**-8 of themselves and less.
    tolerances = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 5e-2, "atol": 1e-3}
    where = f"{clip.__name__} stage {stage} {precision} {factor}"
    assert found == (None if theirs is None else pytest.approx(theirs, rel=tolerances["rtol"])), where
    assert optimizer.get_grad_norm() == pytest.approx(norm, rel=tolerances["rtol"]), where
    clipped = {
        name: each.grad for name, each in zip(gradients, expected, strict=True) if each.grad is not None
    }
    assert_equal(optimizer.gradients(), clipped, **tolerances)
    stepped = {
        name: each.detach() - gradient
        for each, (name, gradient) in zip(expected, clipped.items(), strict=True)
    }
    assert_equal(optimizer.masters(), stepped, **tolerances)


def train_step(
    model: nn.Sequential,
    optimizer: ShardedOptimizer,
    seed: int,
    factor: float | None,
    clip: Callable[[Any], float | None],
) -> float | None:
    optimizer.backward(loss_of(model, seed))
    optimizer.gradient_factor = factor
    found = clip(optimizer)
    optimizer.step()
    assert optimizer.gradient_factor is None
    return found


def test_clipped_gradients_take_a_further_backward_and_the_plugins_own_clipping(pool: Pool) -> None:
    pool.run(2, check_further_backward)


def check_further_backward() -> None:
    for stage in STAGES:
        for precision in ("fp32", "fp16"):
            model, rank = small_model(), dist.get_rank()
            optimizer = shard(model, stage=stage, precision=precision, max_norm=0.5)
            first, second = (mean_gradients(model, [[seed], [seed + 1]]) for seed in (0, 2))
            optimizer.backward(loss_of(model, rank))
            optimizer.clip_grad_by_value(0.01)
            optimizer.backward(loss_of(model, rank + 2))
            before = optimizer.masters()
            optimizer.step()
            expected = {name: first[name].clamp(-0.01, 0.01) + second[name] for name in first}
            norm = torch.cat([each.flatten() for each in expected.values()]).norm().item()
            assert norm > 0.5, "nothing to clip"
            assert optimizer.last_norm == pytest.approx(norm, rel=1e-2 if precision == "fp16" else 1e-5)
            tolerances = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 5e-2, "atol": 1e-3}
            stepped = {name: before[name] - each * 0.5 / norm for name, each in expected.items()}
            assert_equal(optimizer.masters(), stepped, **tolerances)


def test_norm_and_value_are_of_the_tensor_and_pipeline_axes_together(pool: Pool) -> None:
    pool.run(4, check_axes)


def check_axes() -> None:
    for sizes in ({"tp": 2}, {"pp": 2}):
        mesh = ParallelMesh(**sizes)
        (axis,) = sizes
        # Along the axis each rank holds another parameter; over data the mean is 3 and 30.
        parameter = Parameter(torch.zeros(5))
        optimizer = ShardedOptimizer(
            sgd([parameter]),
            [ManagedParameter(name="own", parameter=parameter)],
            mesh=mesh,
            stage=1,
            precision=PrecisionConfig(),
        )
        parameter.grad = torch.full((5,), (2.0 + 2.0 * mesh.rank("dp")) * 10.0 ** mesh.rank(axis))
        norm = math.sqrt(5 * (3.0**2 + 30.0**2))
        assert optimizer.clip_grad_by_norm(norm / 2).item() == pytest.approx(norm, rel=1e-6)
        optimizer.clip_grad_by_value(5.0)
        optimizer.step()
        expected = torch.full((5,), -1.5 if mesh.rank(axis) == 0 else -5.0)
        torch.testing.assert_close(parameter.detach(), expected)
        assert optimizer.last_norm == pytest.approx(norm, rel=1e-6)


def test_clipping_hides_no_overflow(pool: Pool) -> None:
    pool.run(2, check_overflow)


def check_overflow() -> None:
    for stage in STAGES:
        for precision in PRECISIONS:
            for clip in (by_norm, by_value, by_both):
                model = small_model()
                optimizer = shard(model, stage=stage, precision=precision)
                before = weights_of(model)
                if dist.get_rank() == 1:  # infinite alone: clamping would make it finite, as it would no NaN
                    model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
                optimizer.backward(loss_of(model, 0))
                clip(optimizer)
                optimizer.step()
                assert optimizer.skipped_steps == 1, (stage, precision, clip)
                assert not math.isfinite(optimizer.last_norm or 0.0)
                assert_equal(weights_of(model), before, rtol=0, atol=0)
                optimizer.zero_grad()
                optimizer.backward(loss_of(model, 0))
                with pytest.raises(RuntimeError, match="error_if_nonfinite=True"):
                    optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda optimizer: optimizer.clip_grad_by_norm(0.0), "max_norm=0.0: it must be above 0"),
        (lambda optimizer: optimizer.clip_grad_by_norm(1.0, norm_type=0), "norm_type=0: it must be above 0"),
        (lambda optimizer: optimizer.clip_grad_by_value(-1.0), "clip_value=-1.0: it must be above 0"),
    ],
)
def test_what_cannot_be_clipped_to_is_refused(call: Callable[[ShardedOptimizer], Any], told: str) -> None:
    optimizer = object.__new__(ShardedOptimizer)  # refused before anything of it is used
    with pytest.raises(ValueError, match=told):
        call(optimizer)


def test_writes_to_unreduced_gradients_are_noticed(pool: Pool) -> None:
    pool.run(2, check_writes)


def check_writes() -> None:
    writes: dict[str, Callable[[list[Parameter]], Any]] = {
        "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3),
        "foreach norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=True),
        "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3),
        "one": lambda parameters: parameters[-1].grad.mul_(2),  # type: ignore[union-attr]
    }
    for name, write in writes.items():
        for stage in (0, 1):
            for is_last in (False, True):
                model = small_model()
                optimizer = shard(model, stage=stage)
                parameters = list(model.parameters())
                with optimizer.reducer.last_backward(parameters if is_last else []):
                    optimizer.backward(loss_of(model, 0))
                write(parameters)
                with pytest.raises(RuntimeError, match=r"call optimizer\.clip_grad_by_norm\(max_norm\)"):
                    optimizer.step()
                assert optimizer.last_norm is None, (name, stage, is_last)
                dist.barrier()


def test_writes_by_hooks_and_by_zero_grad_are_right(pool: Pool) -> None:
    pool.run(2, check_right_writes)


def check_right_writes() -> None:
    for stage in STAGES:
        model = small_model()
        optimizer = shard(model, stage=stage)
        first, *_ = model.parameters()
        hook = first.register_hook(lambda gradient: gradient * 0)
        optimizer.backward(loss_of(model, 0))
        with optimizer.no_sync():
            optimizer.backward(loss_of(model, 0))
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
        assert not optimizer.gradients()["0.weight"].any()
        assert optimizer.gradients()["0.bias"].any()
        hook.remove()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert optimizer.last_norm == 0.0
        optimizer.backward(loss_of(model, 0))
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert optimizer.last_norm == 0.0
