"""Outputs of modules of earlier stages: None in a model's outputs, or sent, perhaps without gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.pipeline.stage_plan import OutputStructure, StagePlan

from .stages import cut


@dataclass
class Pair:
    """Outputs that are no mapping."""

    scores: Tensor | None = None
    features: Any = None


class Named(NamedTuple):
    """Outputs that are a tuple with names."""

    scores: Any
    features: Any


class Pictures(nn.Module):
    """A tower before two layers, whose features are returned, too."""

    def __init__(self, outputs: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.outputs = outputs

    def forward(self, pixels: Tensor) -> Any:
        features = self.tower(pixels)
        hidden = features
        for layer in self.layers:
            hidden = layer(hidden)
        return self.outputs(hidden, features)


def last_outputs(model: nn.Module, plan: StagePlan) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the outputs of two stages, and the leaves that the second one received."""
    first, last = cut(model, plan, (0, 1), [0, 1, 2]).stages
    pixels = torch.ones(2, 4)
    received = tuple(tensor.detach().requires_grad_() for tensor in first.forward(pixels, ()))
    return last.forward(pixels, received), received


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (lambda scores, features: {"scores": scores, "features": features}, {"features": None}),
        (
            lambda scores, features: {"scores": scores, "all": (features, features.unsqueeze(0))},
            {"all": None},
        ),
        (lambda scores, features: {"scores": scores, "one": [scores, features[:1]]}, {"one": [Tensor, None]}),
        (lambda scores, features: (scores, features), (Tensor, None)),
        (Named, (Tensor, None)),
        (lambda scores, features: Pair(scores, {"last": features}), Pair()),
    ],
)
def test_outputs_of_modules_of_earlier_stages_are_none(outputs: Any, expected: Any) -> None:
    returned, _ = last_outputs(Pictures(outputs), StagePlan(layers="layers", entry=(), leading=("tower",)))
    if isinstance(returned, Pair):
        returned = replace(returned, scores=None)
    elif isinstance(returned, dict):
        scores = returned.pop("scores")
        assert scores.isfinite().all()
    assert kinds_of(returned) == expected


def kinds_of(tree: Any) -> Any:
    """Return dicts, lists and tuples with the class in place of each tensor."""
    if isinstance(tree, dict):
        return {name: kinds_of(value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        kinds = map(kinds_of, tree)
        return Named(*kinds) if isinstance(tree, Named) else type(tree)(kinds)
    return Tensor if isinstance(tree, Tensor) else tree


def test_a_loss_of_an_output_that_travels_without_gradient_is_refused() -> None:
    structure = replace(OutputStructure.of(torch.empty(0)), detached=frozenset({0}))
    plan = StagePlan(layers="layers", entry=(), sent={"tower": structure})
    model = Pictures(lambda scores, features: (scores, features))
    (scores, features), received = last_outputs(model, plan)
    assert torch.equal(features, model.tower(torch.ones(2, 4)))
    scores.sum().backward(retain_graph=True)
    assert [leaf.grad is None for leaf in received] == [False, True]
    with pytest.raises(
        ValueError, match="an output of Linear, which travels between pipeline stages without"
    ):
        features.sum().backward()
