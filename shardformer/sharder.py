"""Apply a policy to a model: first as a dry run on a meta copy, then in place. Policies are defined in policy.py.

[Note: dry run] Constraints are coded where they are enforced: in the constructors of layers and in the functions that
cut. So all sharding is first applied to a copy of the model on the meta device, with stand-ins for groups. The errors
of all modules are collected by path and raised as one error before the model changes. No process group is made or used,
and nothing communicates.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..cluster.errors import errors_of, raise_errors
from ..cluster.layout import LAYER_AXES
from ..cluster.placement import is_sharded, place, placements_of
from ..cluster.transformers_api import Conv1D
from ..derive.logits import LogitsUse
from ..pipeline.stage import cut_stages, local_stages, remember_stages
from ..pipeline.stage_manager import PipelineStageManager
from ..pipeline.stand_ins import StandIn
from .layers.class_change import change_class
from .layers.linear import Linear1D_Row
from .layers.parallel_module import ParallelModule
from .layers.region import Region
from .layers.sequence_axis import INSTEAD, axis_of
from .layers.vocabulary_loss import causal_logits_use
from .meta_copy import meta_copy
from .policy import Errors, ModulePolicyDescription, Policy, SubModuleReplacementDescription, join
from .recompute import recomputable_layers
from .sequence.before_layers import shard_modules_before_layers
from .sequence.boundary import shard_sequences, with_derived_entries
from .sequence.config import UNSHARDED, SequenceParallelism
from .sequence.loss import keep_sharded
from .shard_config import ShardConfig


@dataclass(frozen=True)
class StandInGroup:
    """A process group for a dry run: only its size, and this rank's place in it. It cannot communicate."""

    position: int
    num_ranks: int

    def rank(self) -> int:
        """This rank's place in the group."""
        return self.position

    def size(self) -> int:
        """The number of ranks."""
        return self.num_ranks


def plan_parallelism(model: nn.Module, policy: Policy, config: ShardConfig) -> nn.Module:
    """Return a copy of the model on the meta device, sharded as this rank's model will be. No communication.

    Args:
        model: the full model, perhaps on the meta device; it is not changed.
        policy: the policy to apply.
        config: axes and options; only rank and size of its groups are used.

    Raises:
        ValueError: the model cannot be sharded so; all reasons at once.
    """
    policy.set_model(model)
    policy.set_shard_config(config)
    plan = policy.stage_plan()
    if plan is not None:
        raise_errors(plan.path_errors(model))  # later checks rely on these paths
    if hasattr(policy, "faults"):
        raise ValueError(
            f"{type(policy).__name__} has a method faults(): call it config_errors(), without arguments"
        )
    errors = Errors()
    for error in policy.config_errors():
        errors.add("", error)
    split = _sharded_meta_copy(model, policy, config, errors)
    raise_errors(errors.messages())
    return split


def split_errors(model: nn.Module, policy: Policy, **sizes: Any) -> list[str]:
    """List reasons why a model cannot be sharded over axes of the sizes that `stand_in_config` takes."""
    try:
        plan_parallelism(model, policy, stand_in_config(**sizes))
    except ValueError as error:
        return list(errors_of(error))
    return []


def stand_in_config(
    *,
    tp_size: int = 1,
    num_stages: int = 1,
    sp_size: int = 1,
    num_layers_per_stage: Sequence[int] | None = None,
    sequence: SequenceParallelism = UNSHARDED,
) -> ShardConfig:
    """Return a config with stand-ins for groups of these sizes, for a dry run. No process groups are needed.

    Raises:
        ValueError: the sizes contradict each other.
    """
    groups: Any = [StandInGroup(0, size) if size > 1 else None for size in (tp_size, sp_size)]
    mesh: Any = _StandInMesh(num_stages)
    return ShardConfig(
        tensor_parallel_process_group=groups[0],
        pipeline_stage_manager=PipelineStageManager(mesh, num_layers_per_stage=num_layers_per_stage),
        enable_sequence_parallelism=sequence.mode is not None,
        sequence_parallelism_mode=sequence.mode,
        sequence_parallel_process_group=groups[1],
        enable_sequence_overlap=sequence.overlaps,
        enable_sequence_regather=sequence.regathers,
    )


class ModelSharder:
    """Cut one model into stages and shard it, in place, by a policy.

    Args:
        model: the full model, equal on all ranks.
        policy: the policy to apply.
        shard_config: axes and options.

    Raises:
        ValueError: the policy does not support the config; all reasons at once, before anything is changed.
    """

    def __init__(self, model: nn.Module, policy: Policy, shard_config: ShardConfig) -> None:
        self.model = model
        self.policy = policy
        self.shard_config = shard_config
        plan_parallelism(model, policy, shard_config)
        # Set by `cut_stages` from the full model: the path of the last layer, if sequences stay sharded after it, and
        # the classes of all modules.
        self._last_sharded_layer: str | None = None
        self._classes: set[type[nn.Module]] = set()
        # After the cut: the parameters shared by several stages; for each, its tensor by stage.
        self.ties: list[dict[int, Tensor]] = []

    def layers_by_stage(self) -> dict[int, list[nn.Module]]:
        """Return the layers of every stage, before the cut; without stages, all layers as stage 0."""
        manager, plan = self.shard_config.pipeline_stage_manager, self.policy.stage_plan()
        if manager is None or plan is None:
            return {0: recomputable_layers(self.model)}
        layers = [self.model.get_submodule(path) for path in plan.layer_paths(self.model)]
        bounds = self.policy.stage_bounds()
        return {stage: layers[start:stop] for stage, (start, stop) in enumerate(itertools.pairwise(bounds))}

    def shard(self) -> list[dict[int, Tensor]]:
        """Cut and shard the model. No communication.

        Returns:
            The parameters shared by several stages: for each, its tensor by stage.
        """
        self.cut_stages()
        self.split_layers()
        return self.ties

    def cut_stages(self, device: torch.device | None = None) -> nn.Module:
        """Prepare the full model by the policy's `preprocess`, then release all layers of other ranks' stages.

        Args:
            device: where the model will compute, if it is moved there next; None is its current device.

        Returns:
            The model; `preprocess` may return another one.
        """
        self.model = self.policy.preprocess()
        self.ties = self.policy.get_shared_params()
        self._last_sharded_layer = self._find_last_sharded_layer()
        self._classes = _replace_class(self.model, self.policy)
        manager, plan = self.shard_config.pipeline_stage_manager, self.policy.stage_plan()
        if manager is not None and manager.num_stages > 1 and plan is not None:
            if self.shard_config.sequence_split is not None:
                plan = with_derived_entries(plan, in_encoder=self.shard_config.sequence.is_on_tensor_axis)
            bounds = self.policy.stage_bounds()
            cut_stages(self.model, plan, stages=manager.stages, bounds=bounds, device=device)
        return self.model

    def split_layers(self) -> nn.Module:
        """Shard the sequences within the local layers, and their weights over the tensor axis; after `cut_stages`.

        Returns:
            The model; the policy's `postprocess` may return another one.
        """
        _shard_sequences(self.model, self.policy, self.shard_config)  # first: layers read its axis
        errors = Errors()
        self.policy.errors = errors
        _apply_policy(self.model, self.policy, self.shard_config.groups, self._classes, errors)
        raise_errors(errors.messages())
        stages = local_stages(self.model)
        self.model = self.policy.postprocess()
        remember_stages(self.model, stages)  # postprocess may return another model
        self.shard_config.fused.route_loss(self.model, parallel_output=self.shard_config.parallel_output)
        last = self._last_sharded_layer
        if last is not None and (axis := axis_of(self.model.get_submodule(last))) is not None:
            keep_sharded(self.model, axis)
        if (
            self.shard_config.sequence.is_on_sequence_axis
            and (plan := self.policy.sequence_plan()) is not None
        ):
            shard_modules_before_layers(self.model, plan)
        return self.model

    def _find_last_sharded_layer(self) -> str | None:
        """Return the path of the last layer if sequences stay sharded after it, up to the loss; otherwise None."""
        config, plan = self.shard_config, self.policy.stage_plan()
        is_asked = (
            config.sequence.is_on_sequence_axis and config.parallel_output and self.policy.keeps_sequences
        )
        head = self.policy.head_path()
        if not is_asked or plan is None or head is None:
            return None
        # Another use of the logits would see those of this rank's positions.
        is_causal_loss = causal_logits_use(self.model, head) is not LogitsUse.OTHER
        return plan.layer_paths(self.model)[-1] if is_causal_loss else None


def _sharded_meta_copy(model: nn.Module, policy: Policy, config: ShardConfig, errors: Errors) -> nn.Module:
    """Return a copy of a full model on the meta device, sharded but not cut into stages; see [Note: dry run].

    Every reason why a module cannot be sharded is added to `errors`; the copy is of no use then.
    """
    dry_policy, split = copy.copy(policy), meta_copy(model)
    errors.remember_names(split)
    with errors.at():
        dry_policy.set_model(split)
        dry_policy.set_shard_config(config)
        dry_policy.errors = errors
        split = dry_policy.preprocess()
        classes = _replace_class(split, dry_policy)
        if not errors.messages():
            with errors.at():
                _shard_sequences(split, dry_policy, config)
        changed = _apply_policy(split, dry_policy, config.groups, classes, errors)
        _report_ties(split, changed, errors)
        split = dry_policy.postprocess()
    return split


def _replace_class(model: nn.Module, policy: Policy) -> set[type[nn.Module]]:
    """Give a full model the policy's class for it, if it has one; return the classes of all modules afterwards."""
    if (new_class := policy.new_model_class()) is not None:
        change_class(model, new_class)
    return {type(module) for module in model.modules()}


def _shard_sequences(model: nn.Module, policy: Policy, config: ShardConfig) -> None:
    """Shard sequences within the layers, if the config asks for it; raise ValueError if the policy cannot."""
    split, plan = config.sequence_split, policy.sequence_plan()
    if split is None:
        return
    lack = "stage_plan, which names its layers" if plan is None else "regions that gather sequences"
    if plan is None or (split.settings.is_on_tensor_axis and not policy.gathers_sequences):
        raise ValueError(
            f"sequence_parallelism_mode={split.settings.mode!r}: the {type(policy).__name__} of this "
            f"{type(model).__name__} has no {lack}: give a table, or {INSTEAD}"
        )
    shard_sequences(model, plan, split)


def _apply_policy(
    model: nn.Module,
    policy: Policy,
    groups: Mapping[str, Any],
    classes: set[type[nn.Module]],
    errors: Errors,
) -> set[nn.Module]:
    """Apply the policy's changes to the local modules, and place every parameter on the axes of its layer.

    Paths of the regions are added to `policy.regions`.

    Args:
        model: the local model; modules of other stages are stand-ins.
        policy: the policy.
        groups: groups of the axes by name.
        classes: the classes of all modules of the full model.
        errors: errors are added, by path.

    Returns:
        The sub-modules that were changed in place and not replaced.
    """
    descriptions = policy.module_policy()
    class_keys = {*classes, *(kind.__name__ for kind in classes)}
    if unknown := [getattr(key, "__name__", key) for key in descriptions if key not in class_keys]:
        errors.add(
            "",
            f"the policy describes {', '.join(map(str, unknown))}, but the model has no module of that "
            f"class; its classes are {', '.join(sorted(kind.__name__ for kind in classes))}",
        )
    changed: set[nn.Module] = set()
    # A list, because replacements add modules that must not be visited.
    for path, module in list(model.named_modules()):
        kind = type(module.native if isinstance(module, StandIn) else module)
        for key in (kind, kind.__name__):
            if key in descriptions:
                policy.regions += [
                    join(path, replacement.suffix)
                    for replacement in descriptions[key].sub_module_replacement
                    if replacement.target_module is Region
                ]
                changed |= _apply_description(module, path, descriptions[key], groups, errors)
    _place_remaining(model, policy, groups, errors)
    return changed


def _place_remaining(model: nn.Module, policy: Policy, groups: Mapping[str, Any], errors: Errors) -> None:
    """Place the parameters that no layer has placed, as the policy declares; add errors of those it does not declare.

    Afterwards every parameter has a placement on every layer axis: see [Note: placements per axis].
    """
    axes = [axis for axis in LAYER_AXES if axis in groups and groups[axis].size() > 1]
    unplaced = [
        (name, parameter, axis)
        for name, parameter in model.named_parameters(remove_duplicate=False)  # all must declare the same
        for axis in axes
        if axis not in placements_of(parameter) and not errors.has_error_at(name)
    ]
    for name, parameter, axis in unplaced:
        if (kind := policy.replica(name, axis)) is not None:
            with errors.at(name):
                place(parameter, kind(size=groups[axis].size(), axis=axis), groups[axis].rank())
        else:
            errors.add(
                name,
                f"computes on sharded activations, and the policy does not place it over the axis {axis!r}: name its "
                "module in column, row, norms, partial or whole of the table, or mark it as PartialGradient",
            )


def _apply_description(
    module: nn.Module,
    path: str,
    description: ModulePolicyDescription,
    groups: Mapping[str, Any],
    errors: Errors,
) -> set[nn.Module]:
    """Apply one description to a module or a stand-in; return the sub-modules changed in place and not replaced."""
    replacements = list(description.sub_module_replacement)
    if isinstance(module, StandIn):  # it may have adopted sub-modules that layers here borrow
        local = {name for name, inner in module.named_modules() if not isinstance(inner, StandIn)}
        replacements = [replacement for replacement in replacements if replacement.suffix in local]
    else:
        _change_module(module, path, description, errors)
    changed: set[nn.Module] = set()
    for replacement in replacements:
        with errors.at(join(path, replacement.suffix)):
            if (changed_module := _replace_submodule(module, replacement, groups)) is not None:
                changed.add(changed_module)
    return changed


def _change_module(
    module: nn.Module, path: str, description: ModulePolicyDescription, errors: Errors
) -> None:
    """Apply the parts of a description that concern the module itself: new attributes, parameters and methods."""
    for name, value in description.attribute_replacement.items():
        with errors.at(path):
            _set_attribute(module, name, value)
    for change in description.param_replacement:
        change(module)
    for name, function in description.method_replacement.items():
        if callable(getattr(module, name, None)):
            setattr(module, name, MethodType(function, module))
        else:
            errors.add(
                path,
                f"the policy replaces the method {name!r} of {type(module).__name__}, which has none of that name",
            )


def _replace_submodule(
    module: nn.Module, replacement: SubModuleReplacementDescription, groups: Mapping[str, Any]
) -> nn.Module | None:
    """Replace a sub-module by a parallel one; return it if it was changed in place instead, otherwise None."""
    try:
        native = module.get_submodule(replacement.suffix)
    except AttributeError:
        if replacement.ignore_if_not_exist:
            return None
        raise ValueError(
            f"the policy names {replacement.suffix!r} in {type(module).__name__}, which has no such module; its "
            f"modules are {[name for name, _ in module.named_modules() if name]}"
        ) from None
    if isinstance(native, StandIn):  # on another stage
        return None
    kind, group = replacement.target_module, groups.get(replacement.axis)
    if group is None and isinstance(kind, type) and issubclass(kind, ParallelModule):
        raise ValueError(
            f"the policy replaces {replacement.suffix!r} by a {kind.__name__} over {replacement.axis!r}, an axis "
            f"without a group: make module_policy depend on shard_config.groups, which has {list(groups)}"
        )
    axes_before = {parameter: set(placements_of(parameter)) for parameter in native.parameters()}
    target = kind.from_native_module(native, group, **replacement.kwargs)
    new_axes = {
        axis for parameter, axes in axes_before.items() for axis in set(placements_of(parameter)) - axes
    }
    if new_axes - {replacement.axis}:
        raise ValueError(
            f"{kind.__name__} places parameters over {sorted(new_axes)}, and the policy names {replacement.axis!r}: "
            "name the axis of the layer"
        )
    if target is native:
        return native
    module.set_submodule(replacement.suffix, target)
    return None


def _report_ties(model: nn.Module, changed: set[nn.Module], errors: Errors) -> None:
    """Add errors of layers that share the weight of a sharded layer, and would compute with a shard of it.

    Args:
        model: already sharded.
        changed: the layers that were sharded in place.
        errors: errors are added, by path.
    """
    holders: dict[
        Parameter, list[tuple[str, nn.Module]]
    ] = {}  # the modules of each parameter, with their paths
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append((path, module))
    for parameter, sharers in holders.items():
        unsharded = [
            path
            for path, module in sharers
            if (isinstance(module, (nn.Linear, nn.Embedding, Conv1D)) and module not in changed)
            or (isinstance(module, Linear1D_Row) and module.bias is parameter)  # every rank adds all of it
        ]
        if is_sharded(parameter):
            split = next((path for path, _ in sharers if path not in unsharded), "another")
            for path in itertools.filterfalse(errors.is_tied_otherwise, unsharded):
                errors.add(
                    path,
                    f"shares a parameter with {split}, which is sharded, but is not sharded itself: untie it, "
                    "or use a policy that shards it too",
                )


def _set_attribute(module: nn.Module, path: str, value: Any) -> None:
    """Set an existing attribute of a module or of one in it; raise ValueError if there is none."""
    *parents, name = path.split(".")
    owner: Any = module.get_submodule(".".join(parents))
    if not hasattr(owner, name):
        raise ValueError(
            f"the policy names the attribute {path!r} of {type(module).__name__}, which has none of that name"
        )
    setattr(owner, name, value)


@dataclass(frozen=True)
class _StandInMesh:
    """A mesh with only pipeline stages, for a dry run."""

    num_stages: int

    def rank(self, axis: str) -> int:
        return 0

    def size(self, axis: str) -> int:
        return self.num_stages
