"""Policies: descriptions of how a model is sharded. sharder.py applies them, table_policy.py makes them from tables."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from ..cluster.errors import errors_of
from ..cluster.placement import ReplicaKind, Replicated, TiedOtherwise
from ..derive.build import Copy
from ..derive.double import in_double
from ..derive.plans import copy_of
from ..pipeline.stage import local_stages
from ..pipeline.stage_manager import layer_errors
from ..pipeline.stage_plan import StagePlan, is_within, setting_errors, settings_of
from .shard_config import ShardConfig


@dataclass(frozen=True, kw_only=True)
class SubModuleReplacementDescription:
    """Replacement of one sub-module.

    Args:
        suffix: path of the sub-module, relative to the described module.
        target_module: has `from_native_module(module, process_group, **kwargs)`, which returns the replacement, or
            the native module after changing it.
        kwargs: further arguments of `from_native_module`.
        axis: the axis whose group the replacement gets.
        ignore_if_not_exist: skip a path that does not exist. Otherwise it is an error.
    """

    suffix: str
    target_module: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    axis: str = "tp"
    ignore_if_not_exist: bool = False


@dataclass(frozen=True, kw_only=True)
class ModulePolicyDescription:
    """Changes of every module of one class.

    Args:
        attribute_replacement: new values of attributes, by path relative to the module.
        param_replacement: functions that change the module's own parameters in place.
        sub_module_replacement: replacements of sub-modules.
        method_replacement: functions (taking self) that replace methods, by name.
    """

    attribute_replacement: Mapping[str, Any] = field(default_factory=dict)
    param_replacement: tuple[Callable[[nn.Module], None], ...] = ()
    sub_module_replacement: tuple[SubModuleReplacementDescription, ...] = ()
    method_replacement: Mapping[str, Callable] = field(default_factory=dict)


class Errors:
    """Errors of sharding, by the path of the module, to be raised as one error.

    A message common to several modules is reported once.
    """

    def __init__(self) -> None:
        self._paths: dict[str, list[str]] = {}  # message -> paths of the modules that have it
        self._names: dict[Parameter, list[str]] = {}  # several names of a tied parameter
        self._tied: set[str] = set()  # paths for `is_tied_otherwise`

    def remember_names(self, model: nn.Module) -> None:
        """Remember the names of a model's parameters: the error of a tied parameter names both of its modules."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)

    def is_tied_otherwise(self, path: str) -> bool:
        """Return True if the module at this path was refused because another shards their tied parameter otherwise."""
        return path in self._tied

    @contextmanager
    def at(self, path: str = "") -> Iterator[None]:
        """Collect ValueError and TypeError from the block as errors of the module at this path."""
        try:
            yield
        except TiedOtherwise as error:
            self._tied.add(path)
            others = [name for name in self._names.get(error.parameter, ()) if not is_within(name, path)]
            self.add(path, error.naming(others[0]) if others else str(error))
        except (ValueError, TypeError) as error:
            for message in errors_of(error):
                self.add(path, message)

    def add(self, path: str, message: str) -> None:
        """Add an error of the module at this path; "" is the model."""
        paths = self._paths.setdefault(message, [])
        if path not in paths:
            paths.append(path)

    def has_error_at(self, path: str) -> bool:
        """Return True if the module or parameter at this path, or a module that contains it, has an error."""
        return any(is_within(path, refused) for paths in self._paths.values() for refused in paths)

    def messages(self) -> list[str]:
        """Return all messages, each after the path of the first module that has it, and the number of the others."""
        messages = []
        for message, paths in self._paths.items():
            more = f" (and {len(paths) - 1} more like it)" if len(paths) > 1 else ""
            colon = ": " if paths[0] else ""
            messages.append(f"{paths[0]}{more}{colon}{message}")
        return messages


def join(*paths: str) -> str:
    """Join module paths, skipping empty ones."""
    return ".".join(filter(None, paths))


class Policy(ABC):
    """Sharding of one kind of model. A table (tables/table.py) is shorter; a policy is the general form.

    `ShardFormer.optimize` calls `set_model` and `set_shard_config`, then `config_errors` and `preprocess`, cuts the
    model by `stage_plan`, applies `module_policy` to local modules, and calls `postprocess`. A dry run first makes the
    same calls for a copy of the model on the meta device, and raises all errors together; see sharder.py.

    Attributes:
        errors: collects reasons why the model cannot be sharded; a `ValueError` from a method is collected too.
        regions: paths of the modules that `module_policy` makes a `Region`.
        gathers_sequences: True if `module_policy` gathers sequences within layers, for the modes of the tensor axis.
        keeps_sequences: True if sequences may stay sharded from the last layer to the loss; a trial sets it.
    """

    gathers_sequences = False
    keeps_sequences = True
    model: nn.Module
    shard_config: ShardConfig
    errors: Errors
    regions: list[str]

    def set_model(self, model: nn.Module) -> None:
        """Set the model of the policy, and clear its errors."""
        self.model = model
        self.errors = Errors()
        self.regions = []

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the requested axes and options."""
        self.shard_config = shard_config

    def config_errors(self) -> list[str]:
        """List errors of `shard_config` that no single layer detects, each with advice.

        No communication. The model may be on the meta device.
        """
        if self.shard_config.num_stages == 1:
            return []
        plan, manager = self.stage_plan(), self.shard_config.pipeline_stage_manager
        if plan is None or manager is None:
            return [f"{type(self).__name__} has no stage_plan, so pp_size must be 1"]
        errors = layer_errors(
            plan.num_layers(self.model),
            manager.num_stages,
            manager.num_layers_per_stage,
            plan.stage_size(self.model),
        )
        for source, settings in settings_of(self.model).items():
            errors += setting_errors(self.model, settings, source)
        first_paths: dict[nn.Module, str] = {}
        for path in plan.layer_paths(self.model):
            first = first_paths.setdefault(self.model.get_submodule(path), path)
            if first != path:  # stages would train copies of it apart
                errors.append(
                    f"{path} is the same module as {first}: give each layer its own, or use pp_size=1"
                )
        return errors

    def preprocess(self) -> nn.Module:
        """Change the full model before it is cut and sharded."""
        return self.model

    @abstractmethod
    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        """Return the changes of modules, by class or class name."""

    def replica(self, name: str, axis: str) -> ReplicaKind | None:
        """Return how a parameter that no layer has placed is replicated over an axis; None makes it an error.

        The default is `Replicated` (with equal gradients on all ranks) outside of the regions, and None inside.

        Args:
            name: name of the parameter in the model.
            axis: name of the axis, for example "tp".
        """
        return None if any(is_within(name, region) for region in self.regions) else Replicated

    def postprocess(self) -> nn.Module:
        """Change the model after it is cut and sharded."""
        return self.model

    def new_model_class(self) -> type[nn.Module] | None:
        """Return the new class of the model, or None to keep its class."""
        return None

    def stage_plan(self) -> StagePlan | None:
        """Return the plan with the paths of the model's layers, or None if it cannot be cut into stages."""
        return None

    def small_copy(self) -> Copy:
        """Return a small copy of the model in float64, on which modes of sequence parallelism are tried.

        Raises:
            ValueError: the model has no config, or no small copy trains.
        """
        return in_double(copy_of(self.model))

    def tables(self) -> str | None:
        """Return the tables that this policy consists of, as text; None if it is more than tables."""
        return None

    def sequence_plan(self) -> StagePlan | None:
        """Return the stage plan of the layers that compute on shards of sequences.

        On the sequence axis without an encoder: the gradients of its outputs, which sharded layers read, are partial.
        """
        plan = self.stage_plan()
        return (
            replace(plan, encoder=None) if plan and self.shard_config.sequence.is_on_sequence_axis else plan
        )

    def head_path(self) -> str | None:
        """Return the path of the language-model head, or None if none is known."""
        return None

    def stage_bounds(self) -> list[int]:
        """Return the index of each stage's first layer, then the number of layers; of the full model, even if cut."""
        plan, manager = self.stage_plan(), self.shard_config.pipeline_stage_manager
        assert plan is not None and manager is not None
        if bounds_of_cut := next(iter(local_stages(self.model).values())).bounds:
            return bounds_of_cut
        return manager.bounds(
            plan.num_layers(self.model),
            plan.stage_size(self.model),
            are_alike=plan.has_like_layers(self.model),
        )

    def get_held_layers(self) -> list[nn.Module]:
        """Return the modules of this rank's stages: their layers, and the modules before the first layer.

        For policies and scripts written for ColossalAI.
        """
        plan, manager = self.stage_plan(), self.shard_config.pipeline_stage_manager
        if plan is None or manager is None:
            return [self.model]
        bounds = self.stage_bounds()
        local = {layer for stage in manager.stages for layer in range(bounds[stage], bounds[stage + 1])}
        paths: list[str] = []
        for stack in plan.stacks(self.model):
            paths += stack.plan.before if stack.first in local else ()
            paths += [path for layer, path in enumerate(stack.paths, stack.first) if layer in local]
        return [self.model.get_submodule(path) for path in dict.fromkeys(paths)]

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """Return the parameters shared by several stages: for each, its tensor by stage. Called before the cut."""
        plan, manager = self.stage_plan(), self.shard_config.pipeline_stage_manager
        if plan is None or manager is None or manager.num_stages == 1:
            return []
        bounds = self.stage_bounds()
        stages_of: dict[Tensor, set[int]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            stages_of.setdefault(parameter, set()).update(plan.stages_of(self.model, name, bounds))
        shared = {parameter: stages for parameter, stages in stages_of.items() if len(stages) > 1}
        return [dict.fromkeys(sorted(stages), parameter) for parameter, stages in shared.items()]
