"""Table of TrainingArguments: honoured, meaningless or refused; and their agreement with the plugin's options."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, NamedTuple

from ..cluster.device import is_same_device
from ..cluster.errors import raise_errors
from ..cluster.launch import launch_from_torch
from ..plugins import HybridParallelPlugin
from ..shardformer import PipelineGradientCheckpointConfig

_LOG = logging.getLogger("echelon")


class Refused(NamedTuple):
    """An argument that is refused if it is set.

    Args:
        advice: what to do instead.
        is_set: whether a value is refused.
    """

    advice: str
    is_set: Callable[[Any], bool] = bool


_IN_BACKWARD = ("lomo", "adalomo")
_PLUGIN_PRECISION = "evaluation runs in the plugin's precision: leave it out"
_MADE_IN_PLUGIN = "leave it out, and give the plugin"

# Honoured by Trainer's own code, which runs unchanged, or by this package.
_HONOURED = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 fp16 tf32 activation_checkpointing
gradient_checkpointing use_cache torch_empty_cache_steps logging_strategy logging_steps logging_first_step
log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm
report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps
save_total_limit push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu dataloader_drop_last
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context remove_unused_columns label_names length_column_name ddp_backend ddp_timeout
skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint accelerator_config
"""
HONOURED = frozenset(_HONOURED.split())
# Without effect under any layout, by the reason.
MEANINGLESS = {
    "average_tokens_across_devices": "losses are those of one process",
    "ddp_find_unused_parameters": "an option of torch's DDP, which is not used",
    "ddp_bucket_cap_mb": "an option of torch's DDP, which is not used",
    "ddp_broadcast_buffers": "an option of torch's DDP, which is not used",
    "ddp_static_graph": "an option of torch's DDP, which is not used",
    "fsdp_config": "read only with fsdp, which is refused",
    "liger_kernel_config": "read only with use_liger_kernel, which is refused",
    "torch_compile_backend": "read only with torch_compile, which is refused",
    "torch_compile_mode": "read only with torch_compile, which is refused",
    "local_rank": "set by the launcher",
}
REFUSED = {
    "optim": Refused(
        "it updates weights within backward: use another optimizer, as adamw_torch",
        lambda optim: str(getattr(optim, "value", optim)) in _IN_BACKWARD or "layerwise" in str(optim),
    ),
    "bf16_full_eval": Refused(_PLUGIN_PRECISION),
    "fp16_full_eval": Refused(_PLUGIN_PRECISION),
    "activation_checkpointing_kwargs": Refused(
        f"{_MADE_IN_PLUGIN} gradient_checkpoint_config (which layers) and activation_offload",
        lambda options: bool({*(options or {})} - {"use_reentrant"}),
    ),
    "gradient_checkpointing_kwargs": Refused("", lambda options: False),  # an alias of the one above
    "torch_compile": Refused(f"{_MADE_IN_PLUGIN} compile_layers=True"),
    "use_liger_kernel": Refused(
        f"{_MADE_IN_PLUGIN} enable_fused_loss, enable_fused_normalization or the like"
    ),
    "neftune_noise_alpha": Refused(
        "its noise would differ between the ranks of an embedding: leave it out",
        lambda alpha: alpha is not None,
    ),
    "auto_find_batch_size": Refused("give a per_device_train_batch_size that fits"),
    "eval_use_gather_object": Refused("predictions of all replicas must be tensors: leave it out"),
    "save_on_each_node": Refused(
        "all ranks write shards of one folder, which all machines share: leave it out"
    ),
    "enable_jit_checkpoint": Refused(
        "ranks get the signal at different steps, and saving needs all of them: use save_steps"
    ),
    "parallelism_config": Refused(
        f"{_MADE_IN_PLUGIN} tp_size, sp_size and the like", lambda config: config is not None
    ),
    "dataloader_in_order": Refused(
        "the ranks of a replica would get different batches: leave it out", lambda in_order: not in_order
    ),
    "train_sampling_strategy": Refused(
        "it shards over processes, not replicas: use 'random', 'sequential' or 'group_by_length'",
        lambda strategy: strategy == "batch_rebalance",
    ),
    "fsdp": Refused(f"{_MADE_IN_PLUGIN} zero_stage"),
    "deepspeed": Refused(f"{_MADE_IN_PLUGIN} zero_stage, cpu_offload and pp_size"),
    "debug": Refused("its hooks do not see modules that boost replaces: leave it out"),
}
# Arguments of subclasses, as TRL's and Seq2SeqTrainingArguments.
REFUSED_OF_SUBCLASSES = {
    "activation_offloading": Refused(f"{_MADE_IN_PLUGIN} activation_offload=True"),
    "padding_free": Refused(
        "a batch without a row per sample cannot be split into microbatches: leave it out"
    ),
    "use_liger_loss": Refused(f"{_MADE_IN_PLUGIN} enable_fused_loss"),
    "num_generations": Refused(
        "GRPO and RLOO generate and weigh samples by process, not by replica: use TRL's own"
    ),
}
_ACCELERATOR = {
    "split_batches": ((False,), "per_device_train_batch_size is the batch of a replica"),
    "dispatch_batches": ((None, False), "every rank reads its own batches"),
    "even_batches": ((True,), "every replica needs a batch in every step"),
    "use_seedable_sampler": ((True,), "replicas would draw another order than one process"),
    "gradient_accumulation_kwargs": ((None, {"num_steps": 1}), "give gradient_accumulation_steps"),
}
_LOSS_SCALE = {"hysteresis": 1, "growth_interval": 2000}  # of torch's GradScaler, which Trainer has
_LAUNCHED = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def prepared_plugin(
    args: Any, plugin: HybridParallelPlugin | Mapping[str, Any] | None
) -> HybridParallelPlugin:
    """Check TrainingArguments and plugin together, and return the plugin with the options that the arguments imply.

    Args:
        args: transformers' TrainingArguments, or a subclass.
        plugin: a plugin, or the options of a HybridParallelPlugin, which is made here; then collective over the world.

    Raises:
        ValueError: an argument cannot be honoured, or contradicts the plugin; all errors at once, on every rank.
    """
    options = dict(plugin or {}) if plugin is None or isinstance(plugin, Mapping) else None
    log_unknown(args)
    raise_errors([*argument_errors(args), *(() if options is None else _option_errors(args, options))])
    launch_from_torch(seed=None)  # of accelerate's process group it starts the detection of failures
    if options is not None:
        made = HybridParallelPlugin(**{**implied_options(args), **options})
        raise_errors(_device_errors(args, made))
        return made
    if not isinstance(plugin, HybridParallelPlugin):
        raise ValueError(
            f"plugin={plugin!r} has no execute_pipeline: give a HybridParallelPlugin or LowLevelZeroPlugin, or a dict "
            "of a HybridParallelPlugin's options, as dict(tp_size=2)"
        )
    config = plugin.config
    named: tuple[str, ...] = ("max_norm", "gradient_accumulation_steps", "loss_reduction", "num_microbatches")
    named += ("gradient_checkpoint_config", *_LOSS_SCALE)
    options = {"pp_size": plugin.mesh.size("pp"), **{name: getattr(config, name) for name in named}}
    options["precision"] = None if plugin.has_default_precision else config.precision
    raise_errors([*_option_errors(args, options), *_device_errors(args, plugin)])
    implied = {name: value for name, value in implied_options(args).items() if options.get(name) is None}
    plugin.config, plugin.has_default_precision = replace(config, **implied), False
    return plugin


def implied_options(args: Any) -> dict[str, Any]:
    """Return the options of a plugin that TrainingArguments imply, where the plugin says nothing."""
    implied: dict[str, Any] = {"precision": "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"}
    if args.fp16:
        implied |= _LOSS_SCALE
    if args.gradient_checkpointing:
        implied["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(
            gradient_checkpointing_ratio=1.0
        )
    return implied


def argument_errors(args: Any) -> list[str]:
    """List the arguments that cannot be honoured, each with what to do instead."""
    errors = [
        f"{name}={_shown(getattr(args, name))} of TrainingArguments is not available: {refused.advice}"
        for name, refused in {**REFUSED, **REFUSED_OF_SUBCLASSES}.items()
        if hasattr(args, name) and refused.is_set(getattr(args, name))
    ]
    if getattr(args, "packing", False) and getattr(args, "packing_strategy", "wrapped") != "wrapped":
        errors.append(
            f"packing_strategy={args.packing_strategy!r} of TrainingArguments is not available: it makes a batch "
            "without a row per sample, so give packing_strategy='wrapped'"
        )
    config = args.accelerator_config
    errors += [
        f"accelerator_config.{name}={value!r} is not available, since {reason}: leave it out"
        for name, (allowed, reason) in _ACCELERATOR.items()
        if (value := getattr(config, name, allowed[0])) not in allowed
    ]
    return errors + [
        f"{name} is set: this script was launched for {package}. Start it by torchrun, or by accelerate launch without "
        f"{package}"
        for name, package in _LAUNCHED.items()
        if os.environ.get(name, "false").lower() == "true"
    ]


def log_unknown(args: Any) -> None:
    """Log the names of set arguments that this release of Echelon does not know, of a newer transformers."""
    from transformers import TrainingArguments

    unknown = [name for name, default in _defaults(TrainingArguments) if getattr(args, name) != default]
    if unknown and args.process_index == 0:
        _LOG.warning(
            "TrainingArguments has arguments that Echelon does not know: %s. They do what Trainer makes of them",
            ", ".join(unknown),
        )


def _defaults(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and default of the fields that no table has."""
    for field in fields(arguments):
        if field.name not in HONOURED | MEANINGLESS.keys() | REFUSED.keys():
            made = None if field.default_factory is MISSING else field.default_factory()
            yield field.name, made if field.default is MISSING else field.default


def _option_errors(args: Any, options: Mapping[str, Any]) -> list[str]:
    """List contradictions between TrainingArguments and the options that the plugin was given."""
    errors = []
    wanted = implied_options(args)["precision"]
    if options.get("precision") not in (None, wanted):
        errors.append(
            f"precision={options['precision']!r} of the plugin contradicts bf16={args.bf16}, fp16={args.fp16}, that is "
            f"{wanted!r}: leave it out of the plugin, or change TrainingArguments"
        )
    if options.get("max_norm"):
        errors.append(
            f"max_norm={options['max_norm']} of the plugin: give max_grad_norm in TrainingArguments instead"
        )
    if options.get("gradient_accumulation_steps", 1) != 1:
        errors.append(
            f"gradient_accumulation_steps={options['gradient_accumulation_steps']} of the plugin: give it in "
            "TrainingArguments instead"
        )
    if options.get("loss_reduction", "global") != "global":
        errors.append(
            f"loss_reduction={options['loss_reduction']!r} of the plugin: Trainer's losses need 'global'"
        )
    if getattr(args, "predict_with_generate", False) and options.get("pp_size", 1) > 1:
        errors.append(
            f"predict_with_generate=True needs the model on one rank, but pp_size={options['pp_size']}: leave it out, "
            "or use pp_size=1"
        )
    number = options.get("num_microbatches") or 1
    errors += [
        f"{name}={getattr(args, name)}, the batch of a replica, has fewer samples than num_microbatches={number}: give "
        f"{name} of at least {number}"
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size")
        if getattr(args, name) < number
    ]
    return errors


def _device_errors(args: Any, plugin: HybridParallelPlugin) -> list[str]:
    """List the error of TrainingArguments that see other processes, or another device, than the plugin."""
    world, device = plugin.mesh.world_size, plugin.mesh.device
    if args.world_size != world:
        return [
            f"TrainingArguments sees {args.world_size} process(es), but the plugin {world}: start the script by "
            "torchrun, without a GPU with use_cpu=True (--use_cpu)"
        ]
    if not is_same_device(args.device.type, device):  # accelerate counts CPUs, as cpu:0
        return [
            f"TrainingArguments computes on {args.device}, but the plugin on {device}: give both the same"
        ]
    return []


def _shown(value: Any) -> str:
    return repr(str(getattr(value, "value", value)) if hasattr(value, "value") else value)
