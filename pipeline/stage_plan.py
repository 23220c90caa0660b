"""Stage plans: paths of a model's layers and of the modules around them; settings that a pipeline does not support."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Optional

from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..cluster.transformers_api import ROUTER_LOGITS, router_loss_file

# From (start, stop): the number of parameters of a stage with the layers range(start, stop). It never shrinks when
# layers are added.
StageSize = Callable[[int, int], int]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The structure of a model for a pipeline: modules before the layers, the layers, and all other modules after them.

    A model of two stacks of layers in order (an encoder and a decoder, a vision model and a language model) has a
    separate plan for the first, its encoder. All paths start at the model. Layers are counted over both. A parameter of
    a module that contains the layers belongs to no single stage: it is on every stage of them, and its gradients are
    summed like those of a tied parameter.

    Args:
        layers: path of the list of layers. A `*` in it stands for each entry of a list of such lists, which run one
            after the other (Swin: `encoder.layers.*.blocks`).
        entry: paths of the modules that run before the first layer; they are placed on its stage. Modules that are
            neither entries nor layers run after the layers, and are placed on the stage of the last layer. Modules
            without parameters stay on every stage.
        optional: the entries that some models do not have.
        leading: paths of modules that run between an entry and the first layer, each on the previous one's output:
            linear layers, norms, or complete lists of layers (another model before this one). They are placed with the
            entries.
        everywhere: paths of modules that every stage uses besides its layers, if the model has them: a position bias
            that is passed to all layers, or a module that runs before the first layer and is read again after it.
        arity: a layer returns a tensor (0), or a tuple of this length whose first entry is the tensor.
        repeated: modules of the first layer (paths relative to it) that the first layer of every stage needs, each with
            the layer's boolean attribute that tells if it has the module: T5's position bias.
        between: with a `*`, the name of a module next to each list that runs after it and may change the shape. Some
            lists may have none. It returns a tensor and is distributed over stages like a layer.
        applied: the config's attribute for the total number of layer runs, if each layer runs several times in a row
            (ALBERT); every run is distributed over stages like a layer.
        derives_entry_shapes: later stages derive the outputs of the entries on the meta device, because the input of
            the first layer differs from them in shape or type.
        collecting: attributes of model classes that read the outputs of the layers of all stages, like backbones;
            all outputs are then sent from stage to stage.
        module: path of the module that is called to run the layers; required for an encoder, and for a decoder whose
            parameters outside of all modules the encoder does not use.
        sent: paths of modules before the first layer whose outputs later stages read (encoder states, image features),
            each with the structure of its output. They travel with the hidden states.
        carried: the structure of a layer's output, if all its tensors travel: of models whose layers pass on more than
            hidden states, or that compute between their layers. See [Note: carried outputs] in stand_ins.py.
        encoder: the plan of the encoder. Other modules in its `module` run after its layers. The decoder's plan has
            this module in `sent`, if all stages of the decoder read its output, or else in `leading`.
        returned: of an encoder: the structure of its module's output.

    Raises:
        ValueError: an encoder has no `module`, the decoder's plan lacks it, one of them has layers that run several
            times, or a model that collects outputs has not exactly one stack of layers and one entry.
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
    derives_entry_shapes: bool = False
    collecting: tuple[str, ...] = ()
    module: str = ""
    sent: Mapping[str, "OutputStructure"] = field(default_factory=dict)
    carried: Optional["OutputStructure"] = None
    encoder: Optional["StagePlan"] = None
    returned: Optional["OutputStructure"] = None

    def __post_init__(self) -> None:
        if self.encoder is not None and not (
            self.encoder.module and self.encoder.returned and self.encoder.module in self.before
        ):
            raise ValueError(
                f"the stage plan of an encoder (layers={self.encoder.layers!r}) needs the module whose call runs its "
                "layers, and the structure of its output: set module and returned in it, and name the module in sent "
                f"or leading of its decoder's plan (layers={self.layers!r})"
            )
        if self.encoder is not None and (self.applied or self.encoder.applied):
            raise ValueError("the layers of an encoder or its decoder run once each: leave applied out")
        if self.collecting and (self.encoder is not None or self.applied or len(self.entry) != 1):
            raise ValueError(
                f"collecting={self.collecting} is for one stack of layers that run once, after one entry: leave it out"
            )

    def under(self, prefix: str) -> "StagePlan":
        """Return the plan with `prefix` before all paths, for a model that has this plan's model as this submodule."""
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
            sent={f"{prefix}.{name}": output for name, output in self.sent.items()},
            encoder=None if self.encoder is None else self.encoder.under(prefix),
        )

    def fitted(self, model: nn.Module) -> "StagePlan":
        """Return the plan without the optional entries and the encoder or decoder that this model does not have.

        A model of this kind may have only one of them, and a rank of a cut model only the encoder's layers.
        """
        if self.encoder is None or not _has(model, self.encoder.layers):
            return self._without_missing(model)
        encoder = self.encoder._without_missing(model)
        has_decoder = _has(model, self.layers) and self._paths(model)
        return replace(self._without_missing(model), encoder=encoder) if has_decoder else encoder

    def _without_missing(self, model: nn.Module) -> "StagePlan":
        """Return the plan of this stack without the modules that the model lacks; `fitted` adds the encoder again."""
        missing = [name for name in self.optional if not _has(model, name)]
        if self.encoder is not None and not _has(model, self.encoder.module):
            missing.append(self.encoder.module)
        return replace(
            self,
            entry=tuple(name for name in self.entry if name not in missing),
            leading=tuple(name for name in self.leading if name not in missing),
            sent={name: output for name, output in self.sent.items() if name not in missing},
            optional=(),
            encoder=None,
        )

    def list_paths(self, model: nn.Module) -> list[str]:
        """Return the paths of the lists of layers: one, or one for each entry that a `*` stands for."""
        outer, star, inner = self.layers.partition(".*.")
        if not star:
            return [self.layers]
        return [f"{outer}.{name}.{inner}" for name in model.get_submodule(outer)._modules]

    def with_modules_before(
        self, *, entry: tuple[str, ...], leading: tuple[str, ...], everywhere: tuple[str, ...]
    ) -> "StagePlan":
        """Return the plan with more modules before the first layer: other models, whose shapes may differ.

        With an encoder they are added to its plan.

        Args:
            entry, leading, everywhere: paths, put before those of the attributes of these names.
        """
        first_plan = self if self.encoder is None else self.encoder
        extended = replace(
            first_plan,
            entry=(*entry, *first_plan.entry),
            leading=(*leading, *first_plan.leading),
            everywhere=(*everywhere, *first_plan.everywhere),
            derives_entry_shapes=first_plan.derives_entry_shapes or bool(entry),
        )
        return extended if self.encoder is None else replace(self, encoder=extended)

    def stacks(self, model: nn.Module) -> list["Stack"]:
        """Return the stacks of layers in the order in which they run: one, or an encoder's and a decoder's."""
        stacks: list[Stack] = []
        for plan in (self.encoder, self):
            if plan is not None:
                first = stacks[-1].stop if stacks else 0
                stacks.append(Stack(plan, first, plan._paths(model)))
        return stacks

    @property
    def recorded(self) -> dict[str, "OutputStructure"]:
        """The structures of all outputs of modules that travel, by path."""
        if self.encoder is None:
            return {**self.sent}
        assert self.encoder.returned is not None
        return {**self.encoder.sent, **self.sent, self.encoder.module: self.encoder.returned}

    def _paths(self, model: nn.Module) -> list[str]:
        """Return the path of every layer of this plan without its encoder; once for each run of a layer."""
        paths = []
        for list_path in self.list_paths(model):
            paths += [f"{list_path}.{name}" for name in model.get_submodule(list_path)._modules]
            after = f"{list_path.rpartition('.')[0]}.{self.between}"
            if self.between and _has(model, after):
                paths.append(after)
        if not self.applied:
            return paths
        count: int = getattr(model.config, self.applied)
        return [paths[int(run / (count / len(paths)))] for run in range(count)]  # as transformers computes it

    def layer_paths(self, model: nn.Module) -> list[str]:
        """Return the path of every layer, in the order in which they run."""
        return [path for stack in self.stacks(model) for path in stack.paths]

    def num_layers(self, model: nn.Module) -> int:
        """Return the number of layers of the model."""
        return len(self.layer_paths(model))

    def path_errors(self, model: nn.Module) -> list[str]:
        """Return errors for paths of the plan that the model does not have; empty if it has all, and layers."""
        errors = [] if self.encoder is None else self.encoder.path_errors(model)
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        outer_list = self.layers.partition(".*.")[0]
        module = [self.module] if self.module else []
        errors += [
            f"the stage plan names {name!r}, and this {type(model).__name__} has no such module"
            for name in (outer_list, *self.before, *module)
            if name not in names
        ]
        if outer_list not in names:
            return errors
        if missing := [path for path in self.list_paths(model) if path not in names]:
            return [*errors, f"the stage plan names {self.layers!r}, and there is no {missing[0]!r}"]
        paths = self._paths(model)
        if not paths:
            return [*errors, f"the model has no layers in {self.layers!r}"]
        return errors + [
            f"the stage plan repeats {name!r} of the first layer, and {paths[0]} has no such module"
            for name in self.repeated
            if f"{paths[0]}.{name}" not in names
        ]

    def collects(self, model: nn.Module) -> bool:
        """Return True if models of this class read the outputs of layers of all stages; see [Note: collecting]."""
        return any(hasattr(model, name) for name in self.collecting)

    @property
    def before(self) -> tuple[str, ...]:
        """Paths of the modules that are placed on the stage of the first layer."""
        return (*self.entry, *self.leading, *self.sent)

    def kept_paths(self, model: nn.Module) -> list[str]:
        """Return all paths that the plan places: layers, modules before them, and modules of every stage."""
        encoder_paths = [] if self.encoder is None else self.encoder.kept_paths(model)
        return [*encoder_paths, *self.list_paths(model), *self._paths(model), *self.before, *self.everywhere]

    def layers_of(self, model: nn.Module, name: str) -> list[int]:
        """Return the layers whose stages have the parameter or module of this name.

        A stage with any of these layers has it: a layer's own parameter gives this layer, the embedding gives the first
        layer, and a module of every stage gives all layers.
        """
        stacks = self.stacks(model)
        if self._is_everywhere(model, name):
            containing = [stack for stack in stacks if is_within(name, stack.plan.module)] or stacks
            return [*range(containing[0].first, containing[-1].stop)]
        for stack in stacks:
            if stack.repeats(name):
                return [*range(stack.first, stack.stop)]
            layers = [layer for layer, path in enumerate(stack.paths, stack.first) if is_within(name, path)]
            if layers:
                return layers
            if any(is_within(name, path) for path in stack.plan.before):
                return [stack.first]
            is_encoder = stack is not stacks[-1]
            if is_encoder and is_within(name, stack.plan.module):
                return [stack.stop - 1]  # runs after the encoder's layers
        return [stacks[-1].stop - 1]

    def _is_everywhere(self, model: nn.Module, name: str) -> bool:
        """Return True if every stage has this name: by the plan, or as a parameter of a module around the layers."""
        plans = (self,) if self.encoder is None else (self, self.encoder)
        if any(is_within(name, path) for plan in plans for path in plan.everywhere):
            return True
        owner = name.rpartition(".")[0]
        contains_layers = not owner or any(path.startswith(f"{owner}.") for path in self.kept_paths(model))
        return contains_layers and not _has(model, name)

    def has_like_layers(self, model: nn.Module) -> bool:
        """Return True unless the layers of one stack have twice as many parameters as those of the other, or more."""
        means = [
            sum(tensor.numel() for path in stack.paths for tensor in model.get_submodule(path).parameters())
            / len(stack.paths)
            for stack in self.stacks(model)
        ]
        return max(means) < 2 * min(means) or len(means) == 1

    def stages_of(self, model: nn.Module, name: str, bounds: Sequence[int]) -> list[int]:
        """Return the stages that have the parameter or module of this name, under the bounds of `layer_bounds`."""
        return sorted({bisect_right(bounds, layer) - 1 for layer in self.layers_of(model, name)})

    def stage_size(self, model: nn.Module) -> StageSize:
        """Return a function (start, stop) that counts the parameters of a stage with the layers range(start, stop).

        Tied ones count once, the embedding with the first layer, the head with the last one. The model is complete, not
        cut, and may be on the meta device.
        """
        layers: dict[Parameter, set[int]] = {}  # by parameter, the layers whose stages have it
        for name, parameter in model.named_parameters(remove_duplicate=False):
            layers.setdefault(parameter, set()).update(self.layers_of(model, name))
        # Few parameters belong to several layers; all others are looked up in one prefix sum.
        sums = [0] * (self.num_layers(model) + 1)
        shared = []  # (number of entries, layers) of each parameter of several layers
        for parameter, used_by in layers.items():
            if len(used_by) > 1:
                shared.append((parameter.numel(), used_by))
            else:
                (layer,) = used_by
                sums[layer + 1] += parameter.numel()
        sums = list(accumulate(sums))

        def size(start: int, stop: int) -> int:
            counts = (count for count, users in shared if any(start <= layer < stop for layer in users))
            return sums[stop] - sums[start] + sum(counts)

        return size


@dataclass(frozen=True)
class OutputStructure:
    """The structure of a module's output, without its tensors.

    Args:
        spec: the nesting, as torch's pytrees describe it.
        leaves: for each leaf None if it is a tensor, or a tuple of its value.
        detached: the numbers of tensors that no gradient reaches; they travel without their graphs. Zeros would come
            back otherwise, and AdamW decays weights with zeros.
    """

    spec: TreeSpec
    leaves: tuple[tuple[Any] | None, ...]
    detached: frozenset[int] = frozenset()

    @classmethod
    def of(cls, output: Any) -> "OutputStructure":
        """Return the structure of an output.

        Raises:
            ValueError: it contains an object that is neither a tensor nor plain data.
        """
        leaves, spec = tree_flatten(output)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, int, float, str, bool, type(None))):
                raise ValueError(f"it returns a {type(leaf).__name__}, which cannot travel between stages")
        return cls(spec, tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves))

    @property
    def num_tensors(self) -> int:
        """The number of tensors."""
        return sum(leaf is None for leaf in self.leaves)

    def tensors(self, output: Any, path: str) -> tuple[Tensor, ...]:
        """Return the tensors of an output of the module at a path.

        Raises:
            ValueError: it has another structure, with which the next stage would fill these tensors wrongly.
        """
        structure = OutputStructure.of(output)
        if structure.leaves != self.leaves or not _is_alike(structure.spec, self.spec):
            raise ValueError(
                f"{path} returns another structure than its pipeline stages expect, or other values between its "
                f"tensors: {structure} and not {self}. Use pp_size=1"
            )
        return self.without_graphs([leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)])

    def without_graphs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors, those in `detached` without their graphs."""
        numbered = enumerate(tensors)
        return tuple(tensor.detach() if number in self.detached else tensor for number, tensor in numbered)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return an output of this structure with these tensors, in the order of `tensors`."""
        remaining = iter(tensors)
        return tree_unflatten(
            [next(remaining) if leaf is None else leaf[0] for leaf in self.leaves], self.spec
        )

    def __hash__(self) -> int:
        return hash((str(self.spec), self.leaves))


def _is_alike(left: TreeSpec, right: TreeSpec) -> bool:
    """Return True if structures are equal but for classes: a tuple is like transformers' outputs, which have names."""
    names = [spec.context for spec in (left, right) if spec.context is not None]
    return (
        left.num_children == right.num_children
        and all(name == names[0] for name in names)
        and all(map(_is_alike, left.children(), right.children()))
    )


class Stack(NamedTuple):
    """One list of layers of a model.

    Args:
        plan: the plan of this list: the model's, or its encoder's.
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
        """By the path of a layer: the range (first, stop) of its runs, counted within the stack."""
        ends = {path: run for run, path in enumerate(self.paths, 1)}
        return {path: (self.paths.index(path), end) for path, end in ends.items()}

    def changes_shape(self, path: str) -> bool:
        """Return True if this layer is a module between two lists of layers."""
        return bool(self.plan.between) and path.rpartition(".")[2] == self.plan.between

    def repeats(self, name: str) -> bool:
        """Return True if every stage of the stack needs this parameter or module of the first layer."""
        return any(is_within(name, f"{self.paths[0]}.{module}") for module in self.plan.repeated)


def _has(model: nn.Module, path: str) -> bool:
    """Return True if there is a module at this path, or a stand-in that contains it."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_within(name: str, path: str) -> bool:
    """Return True if a dotted name is `path` or lies below it."""
    return name == path or name.startswith(f"{path}.")


# Settings that collect over all layers. Results would silently be incomplete on a rank with some of the layers, or with
# slices of the sequences.
COLLECTING = (
    "output_hidden_states",
    "output_attentions",
    ROUTER_LOGITS,
    "use_weighted_layer_sum",  # of hidden states, in heads for sound
)


def refused_settings(model: Any) -> list[str]:
    """Return the settings that are refused for a model, because they collect over all layers.

    Router logits are allowed if the model's router loss is added up over the stages; see [Note: router statistics] in
    shardformer/router_loss.py.
    """
    allows_router_logits = router_loss_file(model) is not None
    return [name for name in COLLECTING if not (allows_router_logits and name == ROUTER_LOGITS)]


def settings_of(model: Any) -> dict[str, Mapping[str, Any]]:
    """Return the settings of a model's config and of its sub-configs, by the names that errors use."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    settings = config.to_dict() if hasattr(config, "to_dict") else vars(config)  # a user's own has none
    sub_configs = {name: settings.get(name) for name in getattr(config, "sub_configs", ())}
    named = {f"the model's config, {name}": value for name, value in sub_configs.items() if value is not None}
    return {"the model's config": settings, **named}


def setting_errors(model: Any, settings: Mapping[str, Any], source: str) -> list[str]:
    """Return errors for settings with which a model's results would differ under a pipeline.

    Args:
        model: the model, cut or not.
        settings: by name: arguments of a batch, or a config.
        source: of the settings, for the errors.
    """
    errors = [
        f"{name}={settings[name]!r} in {source} collects the outputs of all layers, but a pipeline stage has only its "
        "own: leave it out or use pp_size=1"
        for name in refused_settings(model)
        if settings.get(name)
    ]
    return errors + layer_drop_errors(
        settings, source, who="the stages of a pipeline", instead="use pp_size=1"
    )


def layer_drop_errors(settings: Mapping[str, Any], source: str, *, who: str, instead: str) -> list[str]:
    """Return errors for settings that skip layers at random, so that ranks would run different ones.

    Args:
        settings: by name: arguments of a batch, or a config.
        source: of the settings, for the errors.
        who: the ranks that would differ, for the errors.
        instead: advice, for the errors.
    """
    return [
        f"{name}={value!r} in {source} drops layers at random, and {who} would not drop the same: set it to 0 or "
        f"{instead}"
        for name, value in settings.items()
        if name.endswith("layerdrop") and value
    ]
