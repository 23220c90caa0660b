from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from echelon.zero.elementwise import KNOWN, require_elementwise


class SignDescent(Optimizer):
    """Element-wise, and unknown."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sign())


class TrustRatio(SignDescent):
    """LARS in short: every parameter moves by a part of its norm."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.norm() * parameter.grad / parameter.grad.norm())


class WholeNorm(SignDescent):
    """Goes by the norm of all gradients that it holds, as Prodigy does."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.cat([parameter.grad.flatten() for parameter in held]).norm()
        for parameter in held:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / norm)


class ByGroup(SignDescent):
    """Some groups ask for steps that mix entries, as Muon beside AdamW does."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                size = parameter.grad.norm() if group.get("mixes", False) else 1.0
                parameter.sub_(group["lr"] * parameter.grad / size)


class OfLargeMatrices(SignDescent):
    """Mixes entries from so many rows and columns on."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                is_large = parameter.ndim == 2 and min(parameter.shape) >= 128
                size = parameter.grad.norm(dim=1, keepdim=True) if is_large else 1.0
                parameter.sub_(group["lr"] * parameter.grad / size)


class Unusual(SignDescent):
    def __init__(self, params: list[Tensor], lr: float, model: object) -> None:
        super().__init__(params, lr)


def matrix() -> list[Parameter]:
    return [Parameter(torch.ones(8, 8))]


@pytest.mark.parametrize("kind", sorted(KNOWN, key=lambda kind: kind.__name__))
def test_known_optimizers_pass_the_trial_too(kind: type[Optimizer]) -> None:
    unknown = type("Subclass", (kind,), {})
    require_elementwise(unknown(matrix(), lr=0.01))


def test_unknown_optimizer_that_is_elementwise_passes() -> None:
    require_elementwise(SignDescent(matrix(), lr=0.0))


@pytest.mark.parametrize("kind", [TrustRatio, WholeNorm, torch.optim.Adafactor])
def test_optimizer_that_mixes_entries_is_refused_by_name(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} is not element-wise.*torch.optim's .*AdamW"):
        require_elementwise(kind(matrix(), lr=0.01))


def test_each_group_is_tried_with_its_options() -> None:
    groups = [{"params": matrix()}, {"params": matrix(), "lr": 0.0, "mixes": True}]
    with pytest.raises(ValueError, match="ByGroup is not element-wise"):
        require_elementwise(ByGroup(groups, lr=0.01))
    groups[1]["mixes"] = False
    require_elementwise(ByGroup(groups, lr=0.01))


def test_what_mixes_entries_of_large_matrices_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="OfLargeMatrices is not element-wise"):
        require_elementwise(OfLargeMatrices(matrix(), lr=0.01))


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizer_that_cannot_be_tried_is_refused_by_name(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} could not be tried on slices"):
        require_elementwise(kind(matrix(), lr=0.01))


def test_optimizer_whose_constructor_needs_more_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Unusual could not be tried.*'model'"):
        require_elementwise(Unusual(matrix(), lr=0.1, model=None))


def test_trial_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    require_elementwise(SignDescent(matrix(), lr=0.1))
    assert torch.equal(torch.get_rng_state(), before)
