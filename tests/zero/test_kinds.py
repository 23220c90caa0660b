from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from echelon.zero.kinds import KNOWN, UpdateKind, require_elementwise, update_kinds

from .owners import OPTIMIZERS, SHAPES

# Divisor of a parameter's gradient, from its group and all parameters of the optimizer.
Size = Callable[[dict[str, Any], Parameter, list[Parameter]], Tensor | float]


def by_rows_of_large_matrices(_: object, parameter: Parameter, __: object) -> Tensor | float:
    is_large = parameter.ndim == 2 and min(parameter.shape) >= 128
    return parameter.grad.norm(dim=1, keepdim=True) if is_large else 1.0


SIZES: dict[str, Size] = {
    "SignDescent": lambda group, parameter, held: parameter.grad.abs(),
    # As LARS.
    "TrustRatio": lambda group, parameter, held: parameter.grad.norm() / parameter.norm(),
    # As Prodigy.
    "WholeNorm": lambda group, parameter, held: torch.cat([one.grad.flatten() for one in held]).norm(),
    # As Muon with AdamW.
    "ByGroup": lambda group, parameter, held: parameter.grad.norm() if group.get("mixes") else 1.0,
    "OfLargeMatrices": by_rows_of_large_matrices,
}


class Scaled(Optimizer):
    """An optimizer that divides gradients by a size."""

    size: Size

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad / type(self).size(group, parameter, held))


class Unusual(Scaled):
    def __init__(self, params: list[Tensor], lr: float, model: object) -> None:
        super().__init__(params, lr)


def kind(name: str) -> type[Scaled]:
    return type(name, (Scaled,), {"size": staticmethod(SIZES[name])})


def matrix() -> list[Parameter]:
    return [Parameter(torch.ones(8, 8))]


ELEMENT, PARAMETER = UpdateKind.ELEMENT, UpdateKind.PARAMETER


@pytest.mark.parametrize("known", sorted(KNOWN, key=lambda kind: kind.__name__))
def test_known_optimizers_pass_the_trial(known: type[Optimizer]) -> None:
    unknown = type("Subclass", (known,), {})
    assert update_kinds(unknown(matrix(), lr=0.01)) == [ELEMENT]


def test_unknown_optimizer_that_is_elementwise_passes() -> None:
    before = torch.get_rng_state()
    require_elementwise(kind("SignDescent")(matrix(), lr=0.0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["TrustRatio", "OfLargeMatrices"])
def test_optimizer_that_mixes_entries_of_a_parameter_needs_full_ones(name: str) -> None:
    assert update_kinds(kind(name)(matrix(), lr=0.01)) == [PARAMETER]


def test_muon_adafactor_lamb_and_soap_need_full_parameters() -> None:
    named = {name: Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    for name, expected in {
        "adafactor": [PARAMETER],
        "lamb": [PARAMETER],
        "soap": [PARAMETER],
        "muon": [PARAMETER, ELEMENT],
        "muon of stacks": [PARAMETER] * 4,
    }.items():
        assert update_kinds(OPTIMIZERS[name](named)) == expected, name


def test_each_group_is_tried_with_its_options() -> None:
    groups = [{"params": matrix()}, {"params": matrix(), "lr": 0.0, "mixes": True}]
    assert update_kinds(kind("ByGroup")(groups, lr=0.01)) == [ELEMENT, PARAMETER]
    groups[1]["mixes"] = False
    assert update_kinds(kind("ByGroup")(groups, lr=0.01)) == [ELEMENT, ELEMENT]
