"""The model parallelized by HybridParallelPlugin, and `boost`, which makes it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..checkpoint.local_tensors import Adapter, saved_state
from ..cluster.errors import raise_errors
from ..cluster.failures import all_ranks_in, naming_failures
from ..cluster.gathering import checked_together, require_equal
from ..cluster.hooks import mark_internal
from ..cluster.layout import SUB_AXES
from ..cluster.mesh import ParallelMesh
from ..pipeline.host_masks import with_host_copies
from ..pipeline.stage import (
    argument,
    makes_positions,
    refuse_direct_calls,
    takes,
    with_known_cache_name,
    with_mask,
    without_cache,
)
from ..pipeline.stage_manager import PipelineStageManager
from ..shardformer.equal_ranks import require_equal_models, tensors_of_call
from ..shardformer.expert_load import ExpertLoad, LayerLoad
from ..shardformer.layers.batch_norm import RunningStatistics
from ..shardformer.refusals import (
    mark_all_parallelized,
    mark_parallelized,
    mark_trained,
    refuse_partial_state,
    trained_errors,
    unfit_model_errors,
)
from ..shardformer.shard_config import ShardConfig
from ..shardformer.transforms import ModelPlan, TransformOptions
from ..zero.inner_optimizer import optimizer_options
from ..zero.optimizer import ShardedOptimizer
from ..zero.partition import ManagedParameter
from ..zero.precision import PrecisionConfig, cast_tables, format_errors, router_formats
from .adapters import peft_model_errors, unwrapped
from .base import BoostedModule, refuse_pipeline
from .engine import PipelineEngine
from .hybrid_config import HybridConfig
from .optimizer_errors import optimizer_errors
from .state import ParameterNames


def boost(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    config: HybridConfig,
    mesh: ParallelMesh,
    stage_manager: PipelineStageManager,
    shard_config: ShardConfig,
) -> "HybridParallelModule":
    """Parallelize a model in place and wrap its optimizer. Collective over the world.

    Args:
        model: equal on all ranks; peft's wrapper is removed.
        optimizer: torch's optimizer of the model's parameters; None to evaluate.
        config: the options of the plugin.
        mesh: all ranks.
        stage_manager: the assignment of stages to ranks.
        shard_config: the options by which layers are sharded, with their groups and stages.

    Returns:
        The parallelized model; its attribute `optimizer` is the wrapped optimizer.

    Raises:
        ValueError: this model cannot be trained with this config; on every rank, all errors at once, before a change.
    """
    planned = checked_together("boost", lambda: plan_boost(model, optimizer, config, mesh, shard_config))
    plan = planned.plan
    with all_ranks_in("boost"):
        require_equal_boosts(plan.model, optimizer)
        names = ParameterNames.of(plan.model)  # Hugging Face's names, of the full model
        if mesh.size("tp", "pp", "sp", *SUB_AXES) > 1:
            mark_all_parallelized(plan.model)  # before the cut, which leaves other modules to each stage
        local = plan.apply()
        refuse_partial_state(local)
        engine = PipelineEngine(local, config, mesh)
        boosted = HybridParallelModule(engine, names, planned.adapters, planned.expert_load)
        boosted.optimizer = wrap_optimizer(boosted, optimizer, plan.ties, stage_manager)
        connect_optimizer(boosted)
    return boosted


class PlannedBoost(NamedTuple):
    """The changes of a model, its adapters, and the counts of tokens per expert, as `plan_boost` plans them."""

    plan: ModelPlan
    adapters: Sequence[Adapter]
    expert_load: ExpertLoad


def plan_boost(
    model: nn.Module,
    optimizer: Optimizer | None,
    config: HybridConfig,
    mesh: ParallelMesh,
    shard_config: ShardConfig,
) -> PlannedBoost:
    """Plan every change that `boost` will make to the model without peft's wrapper. No change, no communication.

    Raises:
        ValueError: a change is impossible; all errors at once.
    """
    raise_errors(unfit_model_errors(model) or peft_model_errors(model))
    model, adapters = unwrapped(model)
    errors = optimizer_errors(model, optimizer, config.ep_size) + format_errors(model, config.dtype)
    if optimizer is not None:
        errors += trained_errors(model)
    if getattr(model, "_compiled_call_impl", None) is not None and not _layers_are_local(mesh):
        errors.append(COMPILED)
    expert_load = ExpertLoad(model, mesh)
    options = TransformOptions(
        shard_config=shard_config,
        device=mesh.device,
        dtype=config.dtype,
        policy=config.custom_policy,
        shards=mesh.size("tp", "pp", "sp") > 1,
        groups={"data": mesh.group("data")}
        | {axis: mesh.group(axis) for axis in SUB_AXES if mesh.size(axis) > 1},
        weights={"overlap": config.wp_overlap, "gradient_dtype": config.wire_dtype},
        expert_load=expert_load,
        recomputed=config.gradient_checkpoint_config,
        offloads=config.activation_offload,
        compiles=config.compile_layers,
    )
    return PlannedBoost(ModelPlan(model, options, errors), adapters, expert_load)


def require_equal_boosts(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Compare models and optimizers over the world. Collective.

    Raises:
        ValueError: ranks differ; raised on every rank.
    """
    require_equal_models(model)
    require_equal(optimizer_options(optimizer), what="the optimizer")


def managed_parameters(
    local: Mapping[str, Parameter],
    ties: list[dict[int, Tensor]],
    *,
    mesh: ParallelMesh,
    stage_manager: PipelineStageManager,
    stages: Mapping[int, Sequence[Parameter]],
) -> list[ManagedParameter]:
    """Describe every parameter of this rank to the optimizer.

    Collective over the world, with equal `ties`: creates the groups of ranks whose stages share a parameter. Stages
    of the same rank need none, since they accumulate into one gradient.

    Args:
        local: this rank's parameters by name.
        ties: the parameters shared by several stages, as `ModelSharder.ties` lists them.
        mesh: all ranks.
        stage_manager: the assignment of stages to ranks.
        stages: by stage of this rank, the parameters that no other stage uses.
    """
    stage_of = {parameter: stage for stage, parameters in stages.items() for parameter in parameters}
    tie_groups: dict[Tensor, dist.ProcessGroup | None] = {}
    for tie in ties:
        ranks = stage_manager.ranks_of(sorted(tie))
        if len(ranks) > 1:
            tie_groups[next(iter(tie.values()))] = stage_manager.tie_group(ranks)
    return [
        ManagedParameter.of(
            name,
            parameter,
            mesh=mesh,
            tie_group=tie_groups.get(parameter),
            stage=stage_of.get(parameter),
        )
        for name, parameter in local.items()
    ]


def wrap_optimizer(
    boosted: "HybridParallelModule",
    optimizer: Optimizer | None,
    ties: list[dict[int, Tensor]],
    stage_manager: PipelineStageManager,
) -> ShardedOptimizer | None:
    """Wrap the optimizer, and cast all parameters to the precision. Collective over the world.

    Without an optimizer it only casts, and returns None. Routers of experts may keep another format.

    Args:
        boosted: the model; all of the optimizer's parameters are from it.
        optimizer: torch's optimizer, or None.
        ties: the parameters shared by several stages, as for `managed_parameters`.
        stage_manager: the assignment of stages to ranks.
    """
    config, mesh, wrapped = boosted.config, boosted.mesh, None
    formats = router_formats(boosted.module, config.dtype)
    if optimizer is not None:
        local, stages = boosted.local_parameters, boosted.engine.parameters
        statistics = RunningStatistics(boosted.module, mesh.group("data"))
        managed = managed_parameters(local, ties, mesh=mesh, stage_manager=stage_manager, stages=stages)
        wrapped = ShardedOptimizer(
            optimizer,
            [replace(entry, dtype=formats.get(entry.parameter)) for entry in managed],
            mesh=mesh,
            stage=config.zero_stage,
            overlap_communication=config.overlap_communication,
            communication_dtype=config.wire_dtype,
            cpu_offload=config.cpu_offload,
            accumulation_steps=config.gradient_accumulation_steps,
            precision=PrecisionConfig(**config.precision_settings),
            max_norm=config.max_norm,
            bucket_size=config.bucket_size,
            agreement=boosted.engine.agreement,
            after_step=statistics.average if statistics.names else None,
        )
    for parameter in boosted.module.parameters():  # parameters that no optimizer manages
        dtype = formats.get(parameter, config.dtype)
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    cast_tables(boosted.module, config.dtype)
    return wrapped


def connect_optimizer(boosted: "HybridParallelModule") -> None:
    """Prepare the model's modules for the optimizer: with `overlap_allgather`, they wait for its all-gathers.

    Without an optimizer, make backward raise on several ranks.
    """
    if boosted.optimizer is not None:
        mark_trained(boosted.module)
        if boosted.config.overlap_allgather:
            boosted.optimizer.parameter_gather.overlap_with_forward(boosted.module)
    elif boosted.mesh.world_size > 1:
        _refuse_backward(boosted.module)


def _refuse_backward(model: nn.Module) -> None:
    """Make backward raise RuntimeError: without the optimizer, nothing reduces gradients over the ranks."""

    def refuse(parameter: Tensor) -> None:
        raise RuntimeError(
            "the model was boosted without an optimizer, so its gradients are not averaged over the ranks: call "
            "booster.boost(model, optimizer) and step what it returns, or freeze the parameters"
        )

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark_internal(refuse))


COMPILED = (
    "torch.compile is not supported with a tp_size, sp_size, wp_size or ep_size above 1: leave it out, and give the "
    "plugin compile_layers=True"
)


def _layers_are_local(mesh: ParallelMesh) -> bool:
    """Return True if no layer communicates with other ranks."""
    return mesh.size("tp", "sp", *SUB_AXES) == 1


class HybridParallelModule(BoostedModule):
    """A model parallelized by the plugin; `unwrap()` returns the transformers model itself.

    A call runs the forward at pp_size=1; with a pipeline it raises and names the call to use instead.

    Args:
        engine: the engine that runs the sharded model.
        names: the names of the full model.
        adapters: its LoRA adapters, for saving.
        expert_load: counts of tokens per expert.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        names: ParameterNames,
        adapters: Sequence[Adapter],
        expert_load: ExpertLoad,
    ) -> None:
        super().__init__(adapters)
        self._expert_load = expert_load
        self.module = module = engine.module
        self.engine, self.config, self.mesh = engine, engine.config, engine.mesh
        self.random = engine.random
        mark_parallelized(module)
        if self.mesh.size("pp") > 1:
            refuse_direct_calls(module)
        self.optimizer: ShardedOptimizer | None = None
        # Not `names` itself, which references the parameters of all other stages.
        self.state_names = names.state
        self._local_parameters = names.local(module)
        self._takes_cache, self._makes_positions = takes(module, "use_cache"), makes_positions(module)

    @property
    def local_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by their first names in the full model."""
        if self.optimizer is not None:
            self.optimizer.parameter_gather.wait()
        return self._local_parameters

    def expert_load(self) -> dict[str, LayerLoad]:
        """Return tokens per expert and imbalance of every mixture layer, over all replicas, since the last call.

        Steps count without messages or waiting. This call is collective over the world, and reads on the host once.

        Returns:
            By the path of the experts in the model, as "model.layers.0.mlp.experts", on every rank alike.

        Raises:
            ValueError: the model has no experts that are counted.
        """
        with naming_failures("model.expert_load"):
            return self._expert_load.read()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, at pp_size=1. Inputs are first moved to the model's device and precision.

        Raises:
            RuntimeError: the model has a pipeline.
            ValueError: inputs differ between the ranks of one model; raised on all of them.
        """
        if torch.compiler.is_compiling() and not _layers_are_local(self.mesh):
            _refuse_compiling()
        refuse_pipeline("model(**batch)", self.mesh)
        return super().forward(*args, **kwargs)

    def ranks_of_call(self) -> Sequence[int]:
        """Return the ranks that compute one model together."""
        return self.mesh.replica_stage_ranks()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs from inputs that must be equal on the ranks of one model.

        Moves inputs to the device and the precision. In training it turns off a cache that the user did not request.

        Raises:
            ValueError: inputs differ between these ranks; raised on all of them.
        """
        self._require_equal_inputs(args, kwargs)
        device_kwargs = self.engine.to_compute(kwargs)
        args, kwargs = self.engine.to_compute(args), with_host_copies(device_kwargs, kwargs, self.module)
        if self.training and self._takes_cache and argument(self.module, args, kwargs, "use_cache") is None:
            kwargs = without_cache(self.module, args, kwargs)  # training would not read it
            if self._makes_positions:
                # Else transformers would read the positions that it makes, to look for packed texts: a wait for the
                # device. See host_masks.py.
                kwargs = with_mask(self.module, args, kwargs)
        with self.random.call(self.module):
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transformers model's `generate`. Inputs must be equal on all ranks of a tensor axis.

        Raises:
            RuntimeError: pp_size, sp_size, wp_size or ep_size is above 1.
            ValueError: inputs differ between the ranks of one model; raised on all of them.
        """
        if self.mesh.size("pp", "sp", *SUB_AXES) > 1:
            raise RuntimeError(
                "model.generate needs pp_size, sp_size, wp_size and ep_size of 1: save the model by "
                "booster.save_model, and generate with what from_pretrained loads"
            )
        with naming_failures("model.generate", self.mesh.replica_stage_ranks()):
            self._require_equal_inputs(args, kwargs)
            module: Any = self.module
            kwargs = with_known_cache_name(module, kwargs)
            return module.generate(*self.engine.to_compute(args), **self.engine.to_compute(kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place, for `execute_pipeline` and calls alike; see torch.nn.Module.compile.

        Raises:
            RuntimeError: layers communicate with other ranks.
        """
        if not _layers_are_local(self.mesh):
            raise RuntimeError(COMPILED)
        self.module.compile(*args, **kwargs)

    def _require_equal_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError if inputs differ between ranks that compute one model together; see [Note: compared calls].

        Calls without gradients, or without an optimizer, are always compared; others at intervals.
        """
        self.engine.agreement.compare_inputs(
            tensors_of_call(args, kwargs),
            training=self.module.training,
            always=self.optimizer is None or not torch.is_grad_enabled(),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, including those that the optimizer has moved out of the parameters (zero_stage 2)."""
        if self.optimizer is None:
            super().zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers, by their names in the full model; a tied one once.

        Raises:
            ValueError: modules have an extra state, which could not be restored.
        """
        parameters = self.local_parameters
        state = saved_state(self.module)
        in_parameters = set(parameters.values())
        return {
            **parameters,
            **{name: tensor for name, tensor in state.items() if tensor not in in_parameters},
        }


@torch.compiler.disable
def _refuse_compiling() -> None:
    """Raise in a call that torch.compile has traced: it cannot trace this function, so it runs it."""
    raise RuntimeError(COMPILED)
