"""Where a model's layers are and what stands around them. How many a stage gets is balance.py, cutting cut.py."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn
from torch.nn import Parameter

from .balance import StageSize


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

    def layers_of(self, model: nn.Module, name: str) -> list[int]:
        """The layers whose stages hold the parameter or module of this name."""
        paths = self.layer_paths(model)
        for layer, path in enumerate(paths):
            if name.startswith(f"{path}."):
                return [layer]
        is_entry = any(name == entry or name.startswith(f"{entry}.") for entry in self.entry)
        return [0 if is_entry else len(paths) - 1]

    def stages_of(self, model: nn.Module, name: str, bounds: Sequence[int]) -> list[int]:
        """The stages that hold the parameter or module of this name, by the bounds of `layer_bounds`."""
        return sorted({bisect_right(bounds, layer) - 1 for layer in self.layers_of(model, name)})

    def stage_size(self, model: nn.Module) -> StageSize:
        """The number of parameters of a stage by its layers, embedding and head included, a tied one once.

        Of a whole model, which may be without memory.
        """
        layers: dict[Parameter, set[int]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            layers.setdefault(parameter, set()).update(self.layers_of(model, name))
        # Few are on several layers; the others are looked up as one sum.
        sums = [0] * (self.num_layers(model) + 1)
        several = []
        for parameter, held in layers.items():
            if len(held) > 1:
                several.append((parameter.numel(), held))
            else:
                sums[held.pop() + 1] += parameter.numel()
        sums = list(accumulate(sums))

        def size(start: int, stop: int) -> int:
            shared = sum(count for count, held in several if any(start <= layer < stop for layer in held))
            return sums[stop] - sums[start] + shared

        return size
