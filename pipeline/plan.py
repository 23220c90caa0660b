"""Where a model's layers are and what stands around them. How many a stage gets is balance.py, cutting cut.py."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Optional

from torch import nn
from torch.nn import Parameter

from .balance import StageSize


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A model as a pipeline sees it: what stands before its layers, the layers, and all the rest after them.

    An encoder-decoder has a plan of its own for the encoder, whose layers come first. All paths are seen from
    the model. Layers are counted over both.

    Args:
        layers: path of the list of layers.
        entry: paths of the modules that run before the first layer; they live on its stage. What is neither
            an entry nor a layer runs after the layers and lives on the last one's stage; what holds no
            parameters stays on every stage.
        optional: those of `entry` that some models lack.
        arity: a layer returns a tensor (0), or a tuple of this length whose first entry is the tensor.
        repeated: modules of the first layer (paths from it) that the first layer of every stage needs, each with
            the attribute of the layer that says that it has it (True or False): T5's position bias.
        module: path of the module that is called to run the layers; needed for an encoder and its decoder.
        encoder: the plan of the encoder, which returns transformers' `BaseModelOutput`, and whose output the
            decoder and its layers take as `encoder_hidden_states`. What else is in its `module` runs after its
            layers.

    Raises:
        ValueError: an encoder or its decoder has no `module`.
    """

    layers: str
    entry: tuple[str, ...]
    optional: tuple[str, ...] = ()
    arity: int = 0
    repeated: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    encoder: Optional["StagePlan"] = None

    def __post_init__(self) -> None:
        if self.encoder is not None and not (self.module and self.encoder.module):
            raise ValueError(
                f"the stage plan of an encoder (layers={self.encoder.layers!r}) and its decoder "
                f"(layers={self.layers!r}) needs the module of both, which is called to run the layers"
            )

    def under(self, prefix: str) -> "StagePlan":
        """The same plan with its paths seen from a model that holds this one at `prefix`."""
        if not prefix:
            return self
        return replace(
            self,
            layers=f"{prefix}.{self.layers}",
            entry=tuple(f"{prefix}.{name}" for name in self.entry),
            optional=tuple(f"{prefix}.{name}" for name in self.optional),
            module=f"{prefix}.{self.module}" if self.module else "",
            encoder=None if self.encoder is None else self.encoder.under(prefix),
        )

    def fitted(self, model: nn.Module) -> "StagePlan":
        """The plan without what it may name and this model does not have, cut or not: encoder, decoder, entries."""
        encoder = None if self.encoder is None else self.encoder.fitted(model)
        entry = tuple(name for name in self.entry if name not in self.optional or _has(model, name))
        own = replace(self, entry=entry)
        if encoder is None or not _has(model, encoder.layers):
            return replace(own, encoder=None)
        return replace(own, encoder=encoder) if _has(model, self.layers) else encoder

    def stacks(self, model: nn.Module) -> list["Stack"]:
        """The lists of layers in the order in which they run: one, or an encoder's and a decoder's."""
        found: list[Stack] = []
        for plan in (self.encoder, self):
            if plan is not None:
                names = model.get_submodule(plan.layers)._modules
                first = found[-1].stop if found else 0
                found.append(Stack(plan, first, [f"{plan.layers}.{name}" for name in names]))
        return found

    def layer_paths(self, model: nn.Module) -> list[str]:
        """The path of every layer, in the order in which they run."""
        return [path for stack in self.stacks(model) for path in stack.paths]

    def num_layers(self, model: nn.Module) -> int:
        """How many layers the model has."""
        return len(self.layer_paths(model))

    def path_faults(self, model: nn.Module) -> list[str]:
        """What the model does not have of what the plan names; empty when it has all of it."""
        found = [] if self.encoder is None else self.encoder.path_faults(model)
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        found += [
            f"the stage plan names {name!r}, and this {type(model).__name__} has no such module"
            for name in (self.layers, *self.entry, *filter(None, [self.module]))
            if name not in names
        ]
        if self.layers not in names:
            return found
        first = next(iter(model.get_submodule(self.layers)._modules), None)
        if first is None:
            return [*found, f"the model has no layers in {self.layers!r}"]
        return found + [
            f"the stage plan repeats {name!r} of the first layer, and {self.layers}.{first} has no such module"
            for name in self.repeated
            if f"{self.layers}.{first}.{name}" not in names
        ]

    def loose_faults(self, model: nn.Module) -> list[str]:
        """Parameters that belong to no stage, since they stand on a module around the layers; empty when none do."""
        kept = self.kept_paths()
        return [
            f"{name} stands beside the layers, on a module that every stage has: put it in a module of its own"
            for name, _ in model.named_parameters()
            if any(path.startswith(f"{name.rpartition('.')[0]}.".lstrip(".")) for path in kept)
            and not any(name.startswith(f"{path}.") for path in kept)
        ]

    def kept_paths(self) -> list[str]:
        """The layers and entries: all that the plan names the place of."""
        return [*([] if self.encoder is None else self.encoder.kept_paths()), self.layers, *self.entry]

    def layers_of(self, model: nn.Module, name: str) -> list[int]:
        """The layers whose stages hold the parameter or module of this name."""
        stacks = self.stacks(model)
        for stack in stacks:
            for layer, path in enumerate(stack.paths, stack.first):
                if is_within(name, path):
                    return [*range(stack.first, stack.stop)] if stack.repeats(name) else [layer]
            if any(is_within(name, entry) for entry in stack.plan.entry):
                return [stack.first]
            if stack is not stacks[-1] and is_within(name, stack.plan.module):
                return [stack.stop - 1]
        return [stacks[-1].stop - 1]

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


class Stack(NamedTuple):
    """One list of layers of a model.

    Args:
        plan: the part of the plan that is about it.
        first: the index of its first layer, counted over the whole model.
        paths: the path of each of its layers.
    """

    plan: StagePlan
    first: int
    paths: list[str]

    @property
    def stop(self) -> int:
        """The index after its last layer."""
        return self.first + len(self.paths)

    def repeats(self, name: str) -> bool:
        """Whether this parameter or module of the first layer is one that every stage of the stack needs."""
        return any(is_within(name, f"{self.paths[0]}.{module}") for module in self.plan.repeated)


def _has(model: nn.Module, path: str) -> bool:
    """Whether there is a module at a path, or a stand-in for one around it."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_within(name: str, path: str) -> bool:
    """Whether a dotted name is `path` or lies below it."""
    return name == path or name.startswith(f"{path}.")
