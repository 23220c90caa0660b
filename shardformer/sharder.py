"""Carrying a policy out on a model. What a policy may say is policy.py."""

import itertools
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ..pipeline.stage import cut_stages, local_stages, remember_stages
from ..pipeline.stand_ins import StandIn
from .checkpoint_config import recomputable_layers
from .layer.parallel_module import ParallelModule
from .policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from .sequence.axis import axis_of
from .sequence.before_layers import compute_parts_before_layers
from .sequence.loss import keep_spread, stays_spread
from .sequence.spread import reckoning, spread_sequences
from .shard_config import ShardConfig


class ModelSharder:
    """Cuts and splits one model, in place, by a policy.

    Args:
        model: the whole model, equal on all ranks.
        policy: what is done to it.
        shard_config: what is asked for.

    Raises:
        ValueError: the policy cannot do what is asked; all reasons at once, before anything is changed.
    """

    def __init__(self, model: nn.Module, policy: Policy, shard_config: ShardConfig) -> None:
        self.model = model
        self.policy = policy
        self.shard_config = shard_config
        policy.set_model(model)
        policy.set_shard_config(shard_config)
        manager = shard_config.pipeline_stage_manager
        faults = policy.faults(
            tp_size=shard_config.tensor_parallel_size,
            num_stages=shard_config.num_stages,
            num_layers_per_stage=None if manager is None else manager.num_layers_per_stage,
        )
        sizes = {"tp_size": shard_config.tensor_parallel_size, "sp_size": shard_config.sequence_parallel_size}
        if faults := faults or policy.sequence_faults(shard_config.sequence, **sizes):
            raise ValueError("\n".join(faults))

    def layers_by_stage(self) -> dict[int, list[nn.Module]]:
        """The layers of every stage, before the cut; all layers stand under 0 where there are no stages."""
        manager, plan = self.shard_config.pipeline_stage_manager, self.policy.stage_plan()
        if manager is None or plan is None:
            return {0: recomputable_layers(self.model)}
        layers = [self.model.get_submodule(path) for path in plan.layer_paths(self.model)]
        bounds = self.policy.stage_bounds()
        return {stage: layers[start:stop] for stage, (start, stop) in enumerate(itertools.pairwise(bounds))}

    def shard(self) -> list[dict[int, Tensor]]:
        """Do it. Communicates nothing.

        Returns:
            The parameters that several stages hold: for each, its tensor by stage.
        """
        self.model = self.policy.preprocess()
        shared = self.policy.get_shared_params()
        spread_layer = self._spread_layer()
        self._replace_class()
        classes = {type(module) for module in self.model.modules()}  # of all stages
        self._cut()
        self._spread_sequences()
        self._replace_modules(classes)
        stages = local_stages(self.model)
        self.model = self.policy.postprocess()
        remember_stages(self.model, stages)  # it may be another
        if spread_layer is not None and (axis := axis_of(self.model.get_submodule(spread_layer))) is not None:
            keep_spread(self.model, axis)
        if self.shard_config.sequence.is_on_sequence_axis and (plan := self.policy.stage_plan()) is not None:
            compute_parts_before_layers(self.model, plan)
        return shared

    def _cut(self) -> None:
        manager, plan = self.shard_config.pipeline_stage_manager, self.policy.stage_plan()
        if manager is not None and manager.num_stages > 1 and plan is not None:
            if self.shard_config.sequence_split is not None:
                plan = reckoning(plan)
            cut_stages(self.model, plan, stages=manager.stages, bounds=self.policy.stage_bounds())

    def _spread_sequences(self) -> None:
        """Before layers are split, which ask what is spread."""
        split, plan = self.shard_config.sequence_split, self.policy.stage_plan()
        if split is not None:
            assert plan is not None  # `sequence_faults` said so
            spread_sequences(self.model, plan, split)

    def _spread_layer(self) -> str | None:
        """The last layer's path, where sequences stay spread behind it."""
        config, plan = self.shard_config, self.policy.stage_plan()
        is_asked = config.sequence.is_on_sequence_axis and config.parallel_output
        if not is_asked or plan is None or not stays_spread(self.model, plan, self.policy.head_path()):
            return None
        return plan.layer_paths(self.model)[-1]

    def _replace_class(self) -> None:
        if (new_class := self.policy.new_model_class()) is not None:
            self.model.__class__ = new_class

    def _replace_modules(self, classes: set[type[nn.Module]]) -> None:
        descriptions = self.policy.module_policy()
        known = {key for each in classes for key in (each, each.__name__)}
        if unknown := [getattr(key, "__name__", key) for key in descriptions if key not in known]:
            raise ValueError(
                f"the policy describes {', '.join(map(str, unknown))}, and the model has no module of that class; its "
                f"classes are {', '.join(sorted(each.__name__ for each in classes))}"
            )
        # Listed first: what a replacement brings in is not searched again.
        for module in list(self.model.modules()):
            kind = type(module.native if isinstance(module, StandIn) else module)
            for key in (kind, kind.__name__):
                if key in descriptions:
                    self._apply(module, descriptions[key])

    def _apply(self, module: nn.Module, description: ModulePolicyDescription) -> None:
        if isinstance(module, StandIn):  # it may hold a part of its native module
            held = {name for name, _ in module.named_modules()}
            for replacement in description.sub_module_replacement:
                if replacement.suffix in held and not isinstance(
                    module.get_submodule(replacement.suffix), StandIn
                ):
                    self._replace(module, replacement)
            return
        for path, value in description.attribute_replacement.items():
            _set_attribute(module, path, value)
        for change in description.param_replacement:
            change(module)
        for name, function in description.method_replacement.items():
            if not callable(getattr(module, name, None)):
                raise ValueError(
                    f"the policy replaces the method {name!r} of {type(module).__name__}, which has none of that name"
                )
            setattr(module, name, MethodType(function, module))
        for replacement in description.sub_module_replacement:
            self._replace(module, replacement)

    def _replace(self, module: nn.Module, replacement: SubModuleReplacementDescription) -> None:
        try:
            native = module.get_submodule(replacement.suffix)
        except AttributeError:
            if replacement.ignore_if_not_exist:
                return
            raise ValueError(
                f"the policy names {replacement.suffix!r} in {type(module).__name__}, which has no such module; its "
                f"modules are {[name for name, _ in module.named_modules() if name]}"
            ) from None
        if isinstance(native, StandIn):  # on another stage
            return
        group = self.shard_config.active_group
        kind = replacement.target_module
        if group is None and isinstance(kind, type) and issubclass(kind, ParallelModule):
            raise ValueError(
                f"the policy puts a {kind.__name__} in the place of {replacement.suffix!r}, and there is no tensor "
                "axis (no group, or enable_tensor_parallelism=False): let module_policy ask for tensor_parallel_size"
            )
        target = replacement.target_module.from_native_module(native, group, **replacement.kwargs)
        if target is not native:
            module.set_submodule(replacement.suffix, target)


def _set_attribute(module: nn.Module, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    owner: Any = module.get_submodule(".".join(parents))
    if not hasattr(owner, name):
        raise ValueError(
            f"the policy names the attribute {path!r} of {type(module).__name__}, which has none of that name"
        )
    setattr(owner, name, value)
