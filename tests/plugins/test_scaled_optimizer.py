import pytest
import torch
from torch.nn import Parameter

from echelon.plugins.scaled_optimizer import ScaledOptimizer


def scaled(initial_scale: float) -> tuple[Parameter, ScaledOptimizer]:
    parameter = Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale)
    return parameter, ScaledOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler, {parameter: "weight"})


def step(parameter: Parameter, optimizer: ScaledOptimizer, factor: float) -> None:
    optimizer.zero_grad()
    optimizer.backward(parameter.sum() * factor)
    optimizer.step()


def test_consecutive_overflows_at_the_lowest_scale_are_an_error() -> None:
    parameter, optimizer = scaled(4.0)
    for _ in range(2):
        step(parameter, optimizer, float("inf"))
    with pytest.raises(
        RuntimeError, match=r"3 steps in a row although the loss scale has fallen to 1,.*bf16"
    ):
        step(parameter, optimizer, float("nan"))
    assert optimizer.skipped_steps == 3
    assert parameter.tolist() == [1, 1]


def test_single_overflows_at_the_lowest_scale_are_no_error() -> None:
    parameter, optimizer = scaled(1.0)
    for _ in range(3):
        step(parameter, optimizer, float("inf"))
        step(parameter, optimizer, 0.25)
    assert optimizer.skipped_steps == 3
    assert parameter.tolist() == [0.25, 0.25]


def test_clipping_that_raises_for_a_norm_leaves_the_gradients() -> None:
    parameter, optimizer = scaled(1.0)
    optimizer.backward((parameter * torch.tensor([1.0, float("inf")])).sum())
    with pytest.raises(RuntimeError, match="error_if_nonfinite=True"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    assert parameter.grad is not None and parameter.grad.tolist() == [1, float("inf")]
