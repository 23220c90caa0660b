"""Several optimizers as one torch optimizer, and Muon for stacks of matrices and fused projections."""

from copy import deepcopy

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from echelon import CombinedOptimizer, Muon


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make() -> tuple[list[Parameter], list[torch.optim.Optimizer]]:
    parameters = [Parameter(drawn(6, 4)), Parameter(drawn(5)), Parameter(drawn(3))]
    return parameters, [Muon(parameters[:1], lr=0.1), AdamW(parameters[1:2]), SGD(parameters[2:], lr=0.1)]


def step(optimizers: list[torch.optim.Optimizer], parameters: list[Parameter], seed: int) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = drawn(*parameter.shape, seed=10 * seed + number)
    for optimizer in optimizers:
        optimizer.step()


def test_a_combined_optimizer_steps_schedules_and_resumes_as_its_members() -> None:
    (ours, members), (theirs, alone) = make(), make()
    combined = CombinedOptimizer(members)
    schedulers = [LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)) for optimizer in (combined, *alone)]
    for seed in range(3):
        step([combined], ours, seed)
        step(alone, theirs, seed)
        for scheduler in schedulers:
            scheduler.step()
    assert all(map(torch.equal, ours, theirs))
    resumed, others = make()
    again = CombinedOptimizer(others)
    for parameter, value in zip(resumed, ours, strict=True):
        parameter.data.copy_(value.detach())
    again.load_state_dict(deepcopy(combined.state_dict()))
    assert [group["lr"] for group in again.param_groups] == [0.1 / 4, 1e-3 / 4, 0.1 / 4]
    step([combined], ours, 3)
    step([again], resumed, 3)
    assert all(map(torch.equal, ours, resumed))
    copied = deepcopy(combined)
    assert copied.optimizers[0].state is copied.state
    assert copied.param_groups[0] is copied.optimizers[0].param_groups[0]


def test_a_stack_and_fused_matrices_are_updated_as_separate_matrices() -> None:
    stack, fused, wide = drawn(3, 8, 5), drawn(12, 6), drawn(4, 9)
    parameters = [Parameter(tensor.clone()) for tensor in (stack, fused, wide)]
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:2], "blocks": (6, 4, 2)},
        {"params": parameters[2:], "blocks": (3, 3, 3), "transposed": True},
    ]

    def separate(stack: torch.Tensor, fused: torch.Tensor, wide: torch.Tensor) -> list[torch.Tensor]:
        return [*stack.unbind(), *fused.split((6, 4, 2)), *wide.split(3, 1)]

    matrices = [Parameter(matrix.clone()) for matrix in separate(stack, fused, wide)]
    ours = Muon(groups, lr=0.1, weight_decay=0.2)
    theirs = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.2)
    for step in range(3):
        for number, parameter in enumerate(parameters):
            parameter.grad = drawn(*parameter.shape, seed=10 * step + number)
        cut = separate(*(parameter.grad for parameter in parameters))
        for matrix, gradient in zip(matrices, cut, strict=True):
            matrix.grad = gradient.clone()
        ours.step()
        theirs.step()
    assert all(map(torch.equal, separate(*parameters), matrices))
