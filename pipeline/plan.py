"""Stage plans: where a model's layers are and what stands around them; and settings that no pipeline can keep."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Optional

from torch import nn
from torch.nn import Parameter

# The number of parameters of a stage that holds the layers from the first index up to before the second. More
# layers never make it smaller.
StageSize = Callable[[int, int], int]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A model as a pipeline sees it: what stands before its layers, the layers, and all the rest after them.

    An encoder-decoder has a plan of its own for the encoder, whose layers come first. All paths are seen from
    the model. Layers are counted over both. A parameter that stands on a module around the layers, and so in no
    module that has one stage, is on every stage of them; its gradients are summed as those of a tied one.

    Args:
        layers: path of the list of layers. A `*` in it stands for each entry of a list of such lists, which run one
            after the other (Swin: `encoder.layers.*.blocks`).
        entry: paths of the modules that run before the first layer; they live on its stage. What is neither
            an entry nor a layer runs after the layers and lives on the last one's stage; what holds no
            parameters stays on every stage.
        optional: of `entry`, those that some models lack.
        leading: paths of modules that run between an entry and the first layer, each on the output of the one before:
            linear layers, norms, or whole lists of layers (another model before this one). They live with the
            entries.
        everywhere: paths of modules that every stage uses beside its layers, where a model has them: a position bias
            that all layers are given, or what runs before the first layer and is read again after it.
        arity: a layer returns a tensor (0), or a tuple of this length whose first entry is the tensor.
        repeated: modules of the first layer (paths from it) that the first layer of every stage needs, each with
            the attribute of the layer that says that it has it (True or False): T5's position bias.
        between: with a `*`, the name of a module beside each list, where it is, that runs after it and may change the
            shape. It returns a tensor and is dealt out as a layer.
        applied: the name in the config of how often layers run in all, where each runs several times in a row
            (ALBERT); every run is dealt out as a layer.
        are_entries_reckoned: whether the first layer is not given what the entries return in shape and kind; later
            stages then find out on the meta device what they would return.
        collecting: attributes of classes of models that read the outputs of layers of all stages, as backbones do;
            then all outputs are sent from stage to stage.
        module: path of the module that is called to run the layers; needed for an encoder and its decoder.
        encoder: the plan of the encoder, which returns transformers' `BaseModelOutput`, and whose output the
            decoder and its layers take as `encoder_hidden_states`. What else is in its `module` runs after its
            layers.

    Raises:
        ValueError: an encoder or its decoder has no `module`, or layers that run several times, or what is
            collected is not from one stack of layers behind one entry.
    """

    layers: str
    entry: tuple[str, ...]
    optional: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    arity: int = 0
    repeated: Mapping[str, str] = field(default_factory=dict)
    between: str = ""
    applied: str = ""
    are_entries_reckoned: bool = False
    collecting: tuple[str, ...] = ()
    module: str = ""
    encoder: Optional["StagePlan"] = None

    def __post_init__(self) -> None:
        if self.encoder is not None and not (self.module and self.encoder.module):
            raise ValueError(
                f"the stage plan of an encoder (layers={self.encoder.layers!r}) and its decoder "
                f"(layers={self.layers!r}) needs the module of both, which is called to run the layers"
            )
        if self.encoder is not None and (self.applied or self.encoder.applied):
            raise ValueError("the layers of an encoder or its decoder run once each: leave applied out")
        if self.collecting and (self.encoder is not None or self.applied or len(self.entry) != 1):
            raise ValueError(
                f"collecting={self.collecting} is for one stack of layers that run once, behind one entry: leave it out"
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
            leading=tuple(f"{prefix}.{name}" for name in self.leading),
            everywhere=tuple(f"{prefix}.{name}" for name in self.everywhere),
            module=f"{prefix}.{self.module}" if self.module else "",
            encoder=None if self.encoder is None else self.encoder.under(prefix),
        )

    def fitted(self, model: nn.Module) -> "StagePlan":
        """The plan without what this model does not have: an encoder or a decoder, optional entries. Cut or not."""
        if self.encoder is None or not _has(model, self.encoder.layers):
            return replace(self._without_missing(model), encoder=None)
        encoder = self.encoder._without_missing(model)
        return replace(self._without_missing(model), encoder=encoder) if _has(model, self.layers) else encoder

    def _without_missing(self, model: nn.Module) -> "StagePlan":
        missing = [name for name in self.optional if not _has(model, name)]
        return replace(self, entry=tuple(name for name in self.entry if name not in missing), optional=())

    def lists(self, model: nn.Module) -> list[str]:
        """The paths of its lists of layers: one, or with a `*` as many as there are entries in its place."""
        outer, star, inner = self.layers.partition(".*.")
        if not star:
            return [self.layers]
        return [f"{outer}.{name}.{inner}" for name in model.get_submodule(outer)._modules]

    def after(
        self, *, entry: tuple[str, ...], leading: tuple[str, ...], everywhere: tuple[str, ...]
    ) -> "StagePlan":
        """The same plan with more that runs before its first layer: other models, of other shapes than its layers'."""
        first = self if self.encoder is None else self.encoder
        extended = replace(
            first,
            entry=(*entry, *first.entry),
            leading=(*leading, *first.leading),
            everywhere=(*everywhere, *first.everywhere),
            are_entries_reckoned=first.are_entries_reckoned or bool(entry),
        )
        return extended if self.encoder is None else replace(self, encoder=extended)

    def stacks(self, model: nn.Module) -> list["Stack"]:
        """The lists of layers in the order in which they run: one, or an encoder's and a decoder's."""
        found: list[Stack] = []
        for plan in (self.encoder, self):
            if plan is not None:
                first = found[-1].stop if found else 0
                found.append(Stack(plan, first, plan._paths(model)))
        return found

    def _paths(self, model: nn.Module) -> list[str]:
        """The path of every layer of this part of the plan; of one that runs several times, so often."""
        paths = []
        for each in self.lists(model):
            paths += [f"{each}.{name}" for name in model.get_submodule(each)._modules]
            after = f"{each.rpartition('.')[0]}.{self.between}"
            paths += [after] if self.between and _has(model, after) else []
        if not self.applied:
            return paths
        count: int = getattr(model.config, self.applied)
        return [paths[int(run / (count / len(paths)))] for run in range(count)]  # as transformers reckons it

    def layer_paths(self, model: nn.Module) -> list[str]:
        """The path of every layer, in the order in which they run."""
        return [path for stack in self.stacks(model) for path in stack.paths]

    def num_layers(self, model: nn.Module) -> int:
        """The number of layers of the model."""
        return len(self.layer_paths(model))

    def path_errors(self, model: nn.Module) -> list[str]:
        """Names of the plan that the model does not have; empty when it has all of them."""
        found = [] if self.encoder is None else self.encoder.path_errors(model)
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        found += [
            f"the stage plan names {name!r}, and this {type(model).__name__} has no such module"
            for name in (self.layers.partition(".*.")[0], *self.before, *filter(None, [self.module]))
            if name not in names
        ]
        if self.layers.partition(".*.")[0] not in names:
            return found
        if missing := [each for each in self.lists(model) if each not in names]:
            return [*found, f"the stage plan names {self.layers!r}, and there is no {missing[0]!r}"]
        paths = self._paths(model)
        if not paths:
            return [*found, f"the model has no layers in {self.layers!r}"]
        return found + [
            f"the stage plan repeats {name!r} of the first layer, and {paths[0]} has no such module"
            for name in self.repeated
            if f"{paths[0]}.{name}" not in names
        ]

    def collects(self, model: nn.Module) -> bool:
        """Return True if a model of this class reads the outputs of layers of all stages; see [Note: collecting]."""
        return any(hasattr(model, name) for name in self.collecting)

    @property
    def before(self) -> tuple[str, ...]:
        """Paths of what lives on the stage of the first layer."""
        return (*self.entry, *self.leading)

    def kept_paths(self, model: nn.Module) -> list[str]:
        """The layers, what runs before them, and what is everywhere: all that the plan names the place of."""
        of_encoder = [] if self.encoder is None else self.encoder.kept_paths(model)
        return [*of_encoder, *self.lists(model), *self._paths(model), *self.before, *self.everywhere]

    def layers_of(self, model: nn.Module, name: str) -> list[int]:
        """The layers whose stages hold the parameter or module of this name."""
        stacks = self.stacks(model)
        if self._is_everywhere(model, name):
            around = [stack for stack in stacks if is_within(name, stack.plan.module)] or stacks
            return [*range(around[0].first, around[-1].stop)]
        for stack in stacks:
            if stack.repeats(name):
                return [*range(stack.first, stack.stop)]
            if found := [
                layer for layer, path in enumerate(stack.paths, stack.first) if is_within(name, path)
            ]:
                return found
            if any(is_within(name, path) for path in stack.plan.before):
                return [stack.first]
            if stack is not stacks[-1] and is_within(name, stack.plan.module):
                return [stack.stop - 1]
        return [stacks[-1].stop - 1]

    def _is_everywhere(self, model: nn.Module, name: str) -> bool:
        """Return True if every stage has this: by the plan, or as a parameter of a module around the layers."""
        plans = (self,) if self.encoder is None else (self, self.encoder)
        if any(is_within(name, path) for plan in plans for path in plan.everywhere):
            return True
        owner = name.rpartition(".")[0]
        is_around = not owner or any(path.startswith(f"{owner}.") for path in self.kept_paths(model))
        return is_around and not _has(model, name)

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
        for parameter, used_by in layers.items():
            if len(used_by) > 1:
                several.append((parameter.numel(), used_by))
            else:
                sums[used_by.pop() + 1] += parameter.numel()
        sums = list(accumulate(sums))

        def size(start: int, stop: int) -> int:
            shared = sum(
                count for count, used_by in several if any(start <= layer < stop for layer in used_by)
            )
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

    @property
    def runs(self) -> dict[str, tuple[int, int]]:
        """By the path of a layer, its first run and the one after its last, counted within the stack."""
        ends = {path: run for run, path in enumerate(self.paths, 1)}
        return {path: (self.paths.index(path), end) for path, end in ends.items()}

    def changes_shape(self, path: str) -> bool:
        """Return True if this layer is what stands between two lists of layers."""
        return bool(self.plan.between) and path.rpartition(".")[2] == self.plan.between

    def repeats(self, name: str) -> bool:
        """Return True if this parameter or module of the first layer is one that every stage of the stack needs."""
        return any(is_within(name, f"{self.paths[0]}.{module}") for module in self.plan.repeated)


def _has(model: nn.Module, path: str) -> bool:
    """Return True if there is a module at a path, or a stand-in for one around it."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_within(name: str, path: str) -> bool:
    """Return True if a dotted name is `path` or lies below it."""
    return name == path or name.startswith(f"{path}.")


# What collects over all layers, and would silently be partial where a rank has some of them, or parts of sequences.
COLLECTING = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "use_weighted_layer_sum",  # of hidden states, in heads for sound
)


def settings_of(model: Any) -> dict[str, Mapping[str, Any]]:
    """The settings of a model's config, and of those inside it, by what messages call them."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    settings = config.to_dict() if hasattr(config, "to_dict") else vars(config)  # a user's own has none
    inside = {name: settings.get(name) for name in getattr(config, "sub_configs", ())}
    of_parts = {f"the model's config, {name}": part for name, part in inside.items() if part is not None}
    return {"the model's config": settings, **of_parts}


def setting_errors(settings: Mapping[str, Any], source: str) -> list[str]:
    """Settings (of a batch, a config) that would give other results under a pipeline; empty when none do."""
    found = [
        f"{name}={settings[name]!r} in {source} collects over all layers, and a pipeline stage sees its own alone: "
        f"leave it out or use pp_size=1"
        for name in COLLECTING
        if settings.get(name)
    ]
    return found + layer_drop_errors(
        settings, source, who="the stages of a pipeline", instead="use pp_size=1"
    )


def layer_drop_errors(settings: Mapping[str, Any], source: str, *, who: str, instead: str) -> list[str]:
    """Settings that would let ranks that must run the same layers run others; empty when none do."""
    return [
        f"{name}={value!r} in {source} leaves out layers at random, and {who} would not leave out the same: set it to "
        f"0 or {instead}"
        for name, value in settings.items()
        if name.endswith("layerdrop") and value
    ]
