"""What HybridParallelPlugin does to a model and its optimizer, once. What they are then is hybrid_module.py."""

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from ..cluster.equal_settings import require_equal_settings
from ..cluster.faults import meet_all_ranks, naming_failures
from ..cluster.gradient_owner import give_gradients_to
from ..cluster.hooks import own
from ..lazy import materialize
from ..pipeline.linear import own_linear_layers
from ..shardformer.checkpoint_config import checkpoint_faults, checkpoint_layers, recomputable_layers
from ..shardformer.equal_ranks import require_equal_models
from ..shardformer.expert_width import expert_width_faults
from ..shardformer.layer.batch_norm import RunningStatistics, own_batch_norms
from ..shardformer.partial_state import refuse_partial_state
from ..shardformer.shard_config import ShardConfig
from ..shardformer.shard_former import sharder_or_faults
from ..shardformer.sharder import ModelSharder
from ..shardformer.weight_split import WeightSplit, make_weight_parallel, weight_split_or_faults
from ..zero.embedding import own_embeddings
from ..zero.groups import optimizer_options
from ..zero.optimizer import ShardedOptimizer
from .hybrid_config import told
from .hybrid_module import COMPILED, HybridParallelModule
from .lora import peft_model_faults, unwrapped
from .names import ParameterNames, managed_parameters
from .optimizer_faults import model_faults, optimizer_faults

if TYPE_CHECKING:
    from .hybrid_parallel import HybridParallelPlugin


def boost(
    model: nn.Module, optimizer: Optimizer | None, plugin: "HybridParallelPlugin"
) -> HybridParallelModule:
    """Split the model and wrap the optimizer, which the returned module holds. Collective over the world.

    Raises:
        ValueError: they do not fit what the plugin was asked for; all reasons at once.
    """
    config, mesh = plugin.config, plugin.mesh
    if faults := model_faults(model) or peft_model_faults(model):
        raise ValueError(told(faults))
    model, adapters = unwrapped(model)
    sharder, split = _checked_splits(model, optimizer, plugin)
    with naming_failures("boost"):
        meet_all_ranks()
        require_equal_models(model)
        require_equal_settings(optimizer_options(optimizer), of="the optimizer")
        names = ParameterNames.of(model)
        model.to(mesh.device)
        config.fused.choose_attention(model, mesh.device)
        shared = sharder.shard() if sharder is not None else []
        if split is not None:
            make_weight_parallel(
                model,
                split.layers,
                mesh.group("weight"),
                native=split.native,
                overlap=config.wp_overlap,
                memory_pool=config.wp_memory_pool,
                gradient_dtype=config.wire_dtype,
            )
        materialize(model)
        own_batch_norms(model, mesh.group("data"))
        refuse_partial_state(model)
        if optimizer is not None:
            own_embeddings(model)
            own_linear_layers(model)
        boosted = HybridParallelModule(model, names, plugin, adapters)
        wrapped = None if optimizer is None else _sharded(optimizer, boosted, shared)
        for parameter in model.parameters():  # what no optimizer manages: frozen, or none was given
            if parameter.is_floating_point() and parameter.dtype != config.precision.dtype:
                parameter.data = parameter.data.to(config.precision.dtype)
        config.fused.fuse(model, config.precision.dtype)
        if wrapped is not None:
            wrapped.after_step = RunningStatistics(model, mesh.group("data")).average
            give_gradients_to(wrapped.reducer, model)
            if config.overlap_allgather:
                wrapped.publisher.let_arrive_later(model)
        elif mesh.world_size > 1:
            _refuse_backward(model)
        boosted.optimizer = wrapped
    return boosted


def _refuse_backward(model: nn.Module) -> None:
    """Let a backward raise RuntimeError: gradients are summed and averaged over the ranks by the optimizer."""

    def refuse(parameter: Tensor) -> None:
        raise RuntimeError(
            "the model was boosted without an optimizer, so its gradients are not averaged over the ranks: call "
            "booster.boost(model, optimizer) and step what it returns, or freeze the parameters"
        )

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(own(refuse))


def _sharded(
    optimizer: Optimizer, boosted: HybridParallelModule, shared: list[dict[int, Tensor]]
) -> ShardedOptimizer:
    """The optimizer of a split model; `shared` as `managed_parameters` takes it. Collective over the world."""
    config, mesh = boosted.plugin.config, boosted.plugin.mesh
    managed = managed_parameters(
        boosted.held,
        shared,
        mesh=mesh,
        stage_manager=boosted.plugin.stage_manager,
        stages=boosted.engine.parameters,
    )
    return ShardedOptimizer(
        optimizer,
        managed,
        mesh=mesh,
        stage=config.zero_stage,
        zero_size=config.zero_size,
        overlap_communication=config.overlap_communication,
        communication_dtype=config.wire_dtype,
        cpu_offload=config.cpu_offload,
        weight_size=config.wp,
        accumulation_steps=config.gradient_accumulation_steps,
        precision=config.precision,
        max_norm=config.max_norm,
        bucket_size=int(config.bucket_size_in_m * 2**20),
    )


def _checked_splits(
    model: nn.Module, optimizer: Optimizer | None, plugin: "HybridParallelPlugin"
) -> tuple[ModelSharder | None, WeightSplit | None]:
    """What will cut and split the model, and share out its weights, once nothing speaks against boosting it.

    Each is None where nothing of the kind was asked for.

    Raises:
        ValueError: something does; all reasons at once.
    """
    config, mesh = plugin.config, plugin.mesh
    faults = optimizer_faults(model, optimizer) + config.fused.model_faults(model, mesh.device)
    if getattr(model, "_compiled_call_impl", None) is not None and mesh.size("tp", "sp") * config.wp > 1:
        faults.append(COMPILED)
    sharder = split = None
    if config.wp > 1:
        split = weight_split_or_faults(model, faults, policy=plugin.custom_policy)
    if mesh.size("tp", "pp", "sp") > 1:
        shard_config = ShardConfig(
            tensor_parallel_process_group=mesh.group("tp"),
            pipeline_stage_manager=plugin.stage_manager,
            parallel_output=config.parallel_output,
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            enable_sequence_parallelism=config.sequence.mode is not None,
            sequence_parallelism_mode=config.sequence.mode,
            sequence_parallel_process_group=mesh.group("sp"),
            sequence_parallel_rings=plugin.rings,
            enable_sequence_overlap=config.sequence.overlaps,
            enable_sequence_regather=config.sequence.regathers,
        )
        sharder = sharder_or_faults(model, plugin.custom_policy, shard_config, faults)
        if plugin.custom_policy is None:  # which may leave experts whole
            tp_size = mesh.size("tp")
            faults += expert_width_faults(model, tp_size=tp_size, dtype=config.precision.dtype)
    checkpoint = config.pipeline.checkpoint
    if checkpoint is not None and not faults:
        layers = {0: recomputable_layers(model)} if sharder is None else sharder.layers_by_stage()
        faults += checkpoint_faults(layers, checkpoint)
        if not faults:
            checkpoint_layers(layers, checkpoint)
    if faults:
        raise ValueError(told(faults))
    return sharder, split
