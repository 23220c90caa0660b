"""Small models and sharded optimizers for the tests of zero."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

Precision = Literal["fp32", "bf16", "fp16"]


def small_model() -> nn.Sequential:
    """Make a model of odd sizes, with the same weights on every call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sgd(parameters: Any) -> Optimizer:
    """Make an SGD with a learning rate of 1: the weights show the gradients."""
    return torch.optim.SGD(parameters, lr=1.0)


def managed(model: nn.Module) -> list[ManagedParameter]:
    """Return all parameters of a model that is sharded over no axis but the data axis."""
    return [ManagedParameter(name=name, parameter=parameter) for name, parameter in model.named_parameters()]


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def shard(
    model: nn.Module | list[ManagedParameter],
    build: Callable[[Any], Optimizer] = sgd,
    *,
    stage: int = 1,
    precision: Precision = "fp32",
    mesh: ParallelMesh | None = None,
    zero_size: int = -1,
    **arguments: Any,
) -> ShardedOptimizer:
    """Make a sharded optimizer of these parameters, or of all those of a model."""
    members = model if isinstance(model, list) else managed(model)
    return ShardedOptimizer(
        build([member.parameter for member in members]),
        members,
        mesh=mesh or ParallelMesh(zero=zero_size),
        stage=stage,
        precision=PrecisionConfig(precision=precision, initial_scale=2.0**6),
        **arguments,
    )


def loss_of(model: nn.Sequential, seed: int) -> Tensor:
    """Return a loss that depends on all parameters."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def train(model: nn.Sequential, optimizer: ShardedOptimizer, steps: range) -> None:
    """Take steps of two backwards each, with other losses on every rank."""
    for step in steps:
        for microbatch in range(2):
            optimizer.backward(loss_of(model, 10 * step + 100 * dist.get_rank() + microbatch))
        optimizer.step()
        optimizer.zero_grad()


def mean_gradients(model: nn.Sequential, seeds_of_ranks: list[list[int]]) -> dict[str, Tensor]:
    """Return the mean over ranks of the sum over microbatches, in plain torch; the model's gradients do not change."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for seeds in seeds_of_ranks:
        for seed in seeds:
            gradients = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
            for name, gradient in zip(sums, gradients, strict=True):
                sums[name] += gradient / len(seeds_of_ranks)
    return sums


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one."""
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Names and dtypes are equal, and numbers up to the rounding of their format.
assert_equal = torch.testing.assert_close
assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0)
