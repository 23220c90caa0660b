"""Where a model's layers are and how they are dealt out to stages. Cutting by it is cut.py."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A model as a pipeline sees it: what stands before its layers, the layers, and all the rest after them.

    Args:
        layers: path of the list of layers, from the model.
        entry: paths of the modules that run before the first layer; they live on the first stage. What is
            neither an entry nor a layer runs after the layers and lives on the last stage; what holds no
            parameters stays on every stage.
        arity: a layer returns a tensor (0), or a tuple of this length whose first entry is the tensor.
    """

    layers: str
    entry: tuple[str, ...]
    arity: int = 0

    def under(self, prefix: str) -> "StagePlan":
        """The same plan with its paths seen from a model that holds this one at `prefix`."""
        if not prefix:
            return self
        entry = tuple(f"{prefix}.{name}" for name in self.entry)
        return StagePlan(layers=f"{prefix}.{self.layers}", entry=entry, arity=self.arity)

    def layer_paths(self, model: nn.Module) -> list[str]:
        """The path of every layer, in the order in which they run."""
        return [f"{self.layers}.{name}" for name in model.get_submodule(self.layers)._modules]

    def num_layers(self, model: nn.Module) -> int:
        """How many layers the model has."""
        return len(self.layer_paths(model))

    def path_faults(self, model: nn.Module) -> list[str]:
        """What the model does not have of what the plan names; empty when it has all of it."""
        names = {name for name, _ in model.named_modules()}
        found = [
            f"the stage plan names {name!r}, and this {type(model).__name__} has no such module"
            for name in (self.layers, *self.entry)
            if name not in names
        ]
        if not found and not list(model.get_submodule(self.layers).children()):
            found.append(f"the model has no layers in {self.layers!r}")
        return found

    def loose_faults(self, model: nn.Module) -> list[str]:
        """Parameters that belong to no stage, since they stand on a module around the layers; empty when none do."""
        kept = (self.layers, *self.entry)
        return [
            f"{name} stands beside the layers, on a module that every stage has: put it in a module of its own"
            for name, _ in model.named_parameters()
            if any(path.startswith(f"{name.rpartition('.')[0]}.".lstrip(".")) for path in kept)
            and not any(name.startswith(f"{path}.") for path in kept)
        ]

    def stages_of(self, model: nn.Module, name: str, bounds: Sequence[int]) -> tuple[int, ...]:
        """The stages that hold the parameter of this name, by the bounds of `layer_bounds`."""
        for layer, path in enumerate(self.layer_paths(model)):
            if name.startswith(f"{path}."):
                return (bisect_right(bounds, layer) - 1,)
        is_entry = any(name == entry or name.startswith(f"{entry}.") for entry in self.entry)
        return (0 if is_entry else len(bounds) - 2,)


def spread_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage gets: equal where they divide, else one more in the middle.

    The first stage also carries the embedding and the last one the head, so they get no more than others.
    """
    base, extra = divmod(num_layers, num_stages)
    first = (num_stages - extra) // 2
    return [base + (first <= stage < first + extra) for stage in range(num_stages)]


def layer_bounds(counts: Sequence[int]) -> list[int]:
    """Where each stage's layers begin, and at the end where the last one's stop: [2, 3] gives [0, 2, 5]."""
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def layer_faults(num_layers: int, num_stages: int, num_layers_per_stage: Sequence[int] | None) -> list[str]:
    """All that is wrong with dealing out the layers; empty when it works."""
    if num_layers < num_stages:
        return [
            f"the model has {num_layers} layers and the pipeline {num_stages} stages, and each stage needs a layer: "
            f"use at most {num_layers} stages (pp_size times the stages of a rank)"
        ]
    if num_layers_per_stage is None:
        return []
    given = list(num_layers_per_stage)
    if len(given) == num_stages and sum(given) == num_layers and min(given) >= 1:
        return []
    return [
        f"num_layers_per_stage={given} must give each of {num_stages} stages at least one layer and "
        f"{num_layers} in all: {spread_layers(num_layers, num_stages)} would"
    ]
