"""The changes that boost and ShardFormer make to a model: one list of transforms, planned and then made in its order.

[Note: transforms] A transform is a function of a `ModelPlan`. It looks at the full model, adds the reasons why its
change is impossible to the plan's errors, and returns the change, which is made later and in place; None if it is not
requested. So all errors are found before the first change. What enforces its constraints where it changes a layer is
tried on a meta copy, see [Note: dry run] in sharder.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cluster.device import free_cached_memory
from ..cluster.errors import errors_of, raise_errors
from ..lazy import materialize
from .compiled_layers import compile_layers, layers_to_compile
from .configs import copy_configs
from .expert_load import ExpertLoad
from .expert_sharding import apply_expert_sharding, expert_errors
from .layers.batch_norm import convert_batch_norms
from .layers.expert_parallel import replay_choices
from .layers.lora import adapted
from .offload import ActivationOffload
from .policy import Policy
from .policy_choice import policy_for
from .recompute import (
    RECOMPUTE,
    PipelineGradientCheckpointConfig,
    checkpoint_layers,
    recomputable_layers,
    recompute_errors,
)
from .refusals import policy_errors
from .shard_config import ShardConfig
from .sharder import ModelSharder
from .split_trial import script_code_errors, sequence_errors
from .table_policy import TablePolicy, expert_width_errors
from .tables.table import Table
from .weight_sharding import apply_weight_sharding, plan_weight_sharding

# Changes a model in place, or returns another one.
Change = Callable[[nn.Module], nn.Module | None]


@dataclass(frozen=True, kw_only=True)
class TransformOptions:
    """The requested changes of a model.

    Args:
        shard_config: axes and options by which layers are cut and sharded, and fused kernels.
        device: where the model will compute.
        dtype: the format of its computation.
        policy: a policy or a table; None takes the policy of the model type.
        shards: apply the policy.
        moves: move the local model to `device`.
        groups: process groups by axis: "data" for the statistics of batch norms, "wp" for weights, "ep" for experts;
            only their ranks and sizes are used before a change is made. An axis without a group changes nothing.
        weights: further arguments of `apply_weight_sharding`.
        expert_load: counts tokens per expert; None does not.
        recomputed: which layers to recompute in backward; None for none.
        offloads: keep inputs of recomputed layers in host memory.
        compiles: compile the layers.
    """

    shard_config: ShardConfig
    device: torch.device
    dtype: torch.dtype
    policy: Policy | Table | None = None
    shards: bool = False
    moves: bool = True
    groups: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    expert_load: ExpertLoad | None = None
    recomputed: PipelineGradientCheckpointConfig | None = None
    offloads: bool = False
    compiles: bool = False


class ModelPlan:
    """The planned changes of a full model. Planning changes nothing and does not communicate.

    Args:
        model: equal on all ranks, not yet changed.
        options: the requested changes.
        errors: further reasons why it cannot be changed, reported with those of the transforms.

    Raises:
        ValueError: a change is impossible; all errors at once.
    """

    def __init__(self, model: nn.Module, options: TransformOptions, errors: list[str]) -> None:
        self.model, self.options, self.errors = model, options, errors
        self.sharder: ModelSharder | None = None
        changes = [transform(self) for transform in TRANSFORMS]
        raise_errors(errors)
        self._changes = [change for change in changes if change is not None]

    @property
    def ties(self) -> list[dict[int, Tensor]]:
        """The parameters shared by several stages, once the model is cut: for each, its tensor by stage."""
        return [] if self.sharder is None else self.sharder.ties

    def apply(self) -> nn.Module:
        """Make all changes; return the model. No communication."""
        model = self.model
        for change in self._changes:
            changed = change(model)
            model = model if changed is None else changed
        return model


def unshared_configs(plan: ModelPlan) -> Change | None:
    """Give the model configs that no other model has."""
    return copy_configs


def attention(plan: ModelPlan) -> Change | None:
    """Choose the attention kernel, and require that the loss can be computed in chunks."""
    fused, device = plan.options.shard_config.fused, plan.options.device
    plan.errors += fused.model_errors(plan.model, device)
    return partial(fused.choose_attention, device=device)


def stages(plan: ModelPlan) -> Change | None:
    """Leave each rank the layers of its pipeline stages."""
    options = plan.options
    if not options.shards:
        return None
    plan.sharder = sharder_or_errors(plan.model, options.policy, options.shard_config, plan.errors)
    sharder = plan.sharder
    return None if sharder is None else lambda _: sharder.cut_stages(options.device)


def sequences_and_tensors(plan: ModelPlan) -> Change | None:
    """Shard sequences within layers, and their weights over the tensor axis."""
    options = plan.options
    if options.shards and options.policy is None:  # another policy may replicate experts
        tp_size = options.shard_config.tensor_parallel_size
        plan.errors += expert_width_errors(plan.model, tp_size=tp_size, dtype=options.dtype)
    sharder = plan.sharder
    if sharder is None:
        return None
    plan.errors += sequence_errors(plan.model, sharder.policy, options.shard_config)
    if options.policy is None and isinstance(sharder.policy, TablePolicy):
        plan.errors += script_code_errors(plan.model, sharder.policy, options.shard_config)
    return lambda _: sharder.split_layers()


def weights(plan: ModelPlan) -> Change | None:
    """Shard the weights of linear layers over the weight axis."""
    group = plan.options.groups.get("wp")
    if group is None:
        return None
    layers = plan_weight_sharding(plan.model, plan.errors, policy=plan.options.policy)
    return partial(apply_weight_sharding, layers=layers or (), group=group, **plan.options.weights)


def counts_of_experts(plan: ModelPlan) -> Change | None:
    """Count the tokens of every expert."""
    return None if plan.options.expert_load is None else plan.options.expert_load.add_hooks


def experts(plan: ModelPlan) -> Change | None:
    """Distribute experts over the expert axis."""
    group = plan.options.groups.get("ep")
    if group is None:
        return None
    plan.errors += expert_errors(plan.model, group.size())
    return partial(apply_expert_sharding, group=group)


def values(plan: ModelPlan) -> Change | None:
    """Move this rank's shards to the device, and compute or read those of a lazily built model."""

    def change(model: nn.Module) -> None:
        if plan.options.moves:
            model.to(plan.options.device)
        materialize(model)
        free_cached_memory(plan.options.device)

    return change


def batch_norms(plan: ModelPlan) -> Change | None:
    """Keep running statistics in float32."""
    group = plan.options.groups.get("data")
    return None if group is None else partial(convert_batch_norms, group=group)


def fused_kernels(plan: ModelPlan) -> Change | None:
    """Fuse norms, elementwise code and the loss."""
    config, dtype = plan.options.shard_config, plan.options.dtype
    return partial(config.fused.fuse, dtype=dtype, parallel_output=config.parallel_output)


def recomputation(plan: ModelPlan) -> Change | None:
    """Recompute layers in backward; their inputs may be in host memory until then."""
    config, sharder = plan.options.recomputed, plan.sharder
    if config is None or plan.errors:  # the layers of each stage are known of a valid plan only
        return None
    layers = {0: recomputable_layers(plan.model)} if sharder is None else sharder.layers_by_stage()
    plan.errors += recompute_errors(layers, config)
    checkpoint = ActivationOffload(plan.options.device).checkpoint if plan.options.offloads else RECOMPUTE
    if "ep" in plan.options.groups:
        checkpoint = replay_choices(checkpoint)
    return lambda _: checkpoint_layers(layers, config, checkpoint)


def compilation(plan: ModelPlan) -> Change | None:
    """Compile the layers."""
    if not plan.options.compiles:
        return None
    layers = layers_to_compile(plan.model, plan.errors, policy=plan.options.policy)
    return lambda _: compile_layers(layers)


# In this order:
TRANSFORMS: tuple[Callable[[ModelPlan], Change | None], ...] = (
    unshared_configs,  # the next ones write into configs, which the script may use for other models
    attention,  # before the cut: stages share configs; sequence modes replace the chosen kernel
    stages,  # before layers are sharded: those of other stages are not there to be sharded
    sequences_and_tensors,  # before weights: only linear layers that no other axis has replaced are sharded over wp
    weights,
    counts_of_experts,  # before experts: a hook counts the tokens as the router chose them, before they are exchanged
    experts,  # after tensors: a second placement of the same parameters
    values,  # after the axes: only this rank's shards take memory
    batch_norms,  # of values: statistics are converted
    fused_kernels,  # of sharded layers: norms of sharded features and heads over the vocabulary have kernels of theirs
    recomputation,  # around fused modules
    compilation,  # around everything within a layer: a layer is traced with all these changes
)


def sharder_or_errors(
    model: nn.Module, policy: Policy | Table | None, config: ShardConfig, errors: list[str]
) -> ModelSharder | None:
    """Return a sharder of the model; if it cannot be sharded, add the reasons to `errors` and return None.

    Args:
        model: the full model.
        policy: a policy or a table; None takes the policy of the model type.
        config: axes and options.
        errors: reasons are appended.
    """
    if errors_of_policy := policy_errors("policy", policy):
        errors += errors_of_policy
        return None
    if isinstance(policy, Table):
        policy = TablePolicy(policy)
    try:
        policy = policy or policy_for(model)
        errors += _adapter_errors(model, policy, config)
        return ModelSharder(model, policy, config)
    except ValueError as error:
        errors += errors_of(error)
        return None


def _adapter_errors(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """List the error of peft's adapters that a policy other than a table would leave unsharded; empty without one."""
    path = next((path for path, _ in adapted(model)), None)
    if path is None or isinstance(policy, TablePolicy) or config.tensor_parallel_size == 1:
        return []
    return [
        f"{path} has an adapter, which {type(policy).__name__} cannot shard: use a table "
        "(echelon.shardformer.Table), or tp_size=1"
    ]
