"""Conversion of DeepSpeed's JSON configurations to arguments of LowLevelZeroPlugin, by one table of keys.

Keys have their meaning of DeepSpeed 0.18 (its configuration page); docs/coming-from-deepspeed.md lists them. The value
"auto", which transformers' Trainer fills in, is as if the key were left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cluster.errors import raise_errors
from .configuration import Key, Settings, read_configuration

_ANY, _BOOL, _COUNT, _NUMBER = Key(), Key("a bool"), Key("an integer"), Key("a number")


def _only(*allowed: Any, why: str) -> Key:
    """Return the key of values that change nothing; others are refused."""
    return Key(allowed=allowed, why=why)


_NO_MASTERS = "is not available: weights of 16 bits have masters in float32; use false"
_OFF = {"enabled": False}
_NO_FILES = "must be 'cpu' or 'none': states are not kept on disks"
KEYS = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": Key("an integer", "gradient_accumulation_steps"),
    "gradient_clipping": Key("a number", "max_norm"),
    "communication_data_type": _only(
        None,
        *("fp32", "fp16", "bf16", "bfp16"),  # "bfp16" until DeepSpeed 0.9
        why="must be 'fp32', 'fp16' or 'bf16'",
    ),
    "bf16.enabled": _BOOL,
    "bf16.bf16_master_weights_and_grads": _only(False, why=_NO_MASTERS),
    "fp16.enabled": _BOOL,
    "fp16.loss_scale": _only(
        0, 0.0, why="is a constant loss scale, which is not available: use 0, and initial_scale_power"
    ),
    "fp16.initial_scale_power": _COUNT,
    "fp16.loss_scale_window": Key("an integer", "growth_interval"),
    "fp16.hysteresis": Key("an integer", "hysteresis"),
    "fp16.min_loss_scale": Key("a number", "min_scale"),
    "fp16.auto_cast": _only(False, why="is not available: inputs are cast in any case; use false"),
    "fp16.consecutive_hysteresis": _only(False, why="is not available: use false"),
    "fp16.fp16_master_weights_and_grads": _only(False, why=_NO_MASTERS),
    "zero_optimization.stage": _only(
        0, 1, 2, why="must be 0, 1 or 2; TorchFSDPPlugin shards parameters too, as stage 3 does"
    ),
    "zero_optimization.overlap_comm": Key("a bool", "overlap_communication"),
    "zero_optimization.reduce_bucket_size": _NUMBER,  # elements, as of the plugin
    "zero_optimization.offload_optimizer.device": _only("cpu", "none", None, why=_NO_FILES),
    "zero_optimization.offload_param.device": _only(
        "none",
        None,
        why="is not available: parameters stay on the device; use TorchFSDPPlugin(cpu_offload=True)",
    ),
    "zero_optimization.cpu_offload": Key("a bool", "cpu_offload"),
    "prescale_gradients": _only(False, why="is not available: gradients are averaged in float32; use false"),
    "gradient_predivide_factor": _only(1, 1.0, why="is not available: leave it out"),
    "sparse_gradients": _only(False, why="is not available: use false"),
    "amp.enabled": _only(False, why="is apex's, which is not available: use bf16 or fp16"),
    "data_types.grad_accum_dtype": _only(None, "fp32", why="must be 'fp32', in which gradients are added"),
    "activation_checkpointing": _only(
        why="is not read: leave it out, and call model.gradient_checkpointing_enable() before boost"
    ),
    "bfloat16": _only(why="is an older name: write bf16"),
    "pipeline": _only(why="is not read: leave it out, and use HybridParallelPlugin(pp_size=...)"),
    "tensor_parallel": _only(why="is not read: leave it out, and use HybridParallelPlugin(tp_size=...)"),
    **{
        name: _only(_OFF, why="is not available: leave it out")
        for name in (
            *("autotuning", "compression_training", "curriculum_learning", "data_efficiency"),
            *("eigenvalue", "elasticity", "hybrid_engine", "progressive_layer_drop", "sparse_attention"),
        )
    },
}
# Sections of what Echelon gets as objects; the caller says that the script builds them.
OBJECTS = {
    "optimizer": "build it in the script, as torch.optim.AdamW(model.parameters(), ...)",
    "scheduler": "build it in the script, as transformers.get_scheduler(...)",
}
# Keys that change neither numbers nor what is supported. Buffers, buckets and order of messages are Echelon's.
IGNORED: dict[str, tuple[str, ...] | None] = {
    "": (
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "seed"),
        *(
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "tensorboard",
            "wandb",
            "csv_monitor",
        ),
        *(
            "aio",
            "comet",
            "flops_profiler",
            "comms_logger",
            "checkpoint",
            "disable_allgather",
            "fp32_allreduce",
        ),
    ),
    "zero_optimization": (
        *("allgather_partitions", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients"),
        *(
            "round_robin_gradients",
            "load_from_fp32_weights",
            "ignore_unused_parameters",
            "elastic_checkpoint",
        ),
        *("use_multi_rank_bucket_allreduce", "overlap_reduce_scatter", "sub_group_size"),
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
        *("stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
    ),
    "zero_optimization.offload_optimizer": (
        *("pin_memory", "buffer_count", "fast_init", "pipeline", "pipeline_read", "pipeline_write", "ratio"),
        "nvme_path",
    ),
    "zero_optimization.offload_param": (
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "nvme_path",
    ),
    "bf16": ("immediate_grad_update", "check_grad_overflow"),
}
_FORMATS = {None: None, "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}


def plugin_arguments(
    config: Mapping[str, Any] | str | Path, *, num_replicas: int, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the keyword arguments of LowLevelZeroPlugin for a DeepSpeed configuration. No communication.

    Args:
        config: a configuration, or the path of its .json file.
        num_replicas: the number of processes, of which the batch sizes must be multiples.
        without: sections to leave out, since the script builds what they describe: keys of `OBJECTS`, or one of them.

    Raises:
        ValueError: keys or values are unknown or unsupported; all errors at once.
    """
    without = (without,) if isinstance(without, str) else without
    sections = _without_auto(read_configuration(config, "DeepSpeed"))
    errors = [
        f"{name} is not read: {advice}, and give from_config(..., without=({name!r},))"
        for name, advice in OBJECTS.items()
        if name in sections and name not in without
    ]
    errors += [
        f"without={name!r} names no section that the script may build: use {' or '.join(map(repr, OBJECTS))}"
        for name in without
        if name not in OBJECTS
    ]
    read = {name: value for name, value in sections.items() if name not in OBJECTS}
    settings = Settings(read, KEYS, IGNORED, errors)
    arguments = settings.arguments() | _precision(settings)
    arguments["stage"] = settings.get("zero_optimization.stage", 0)
    if settings.has("communication_data_type"):
        arguments["communication_dtype"] = _FORMATS[settings.get("communication_data_type")]
    if settings.has("zero_optimization.reduce_bucket_size"):
        size = settings.get("zero_optimization.reduce_bucket_size")
        arguments["reduce_bucket_size_in_m"] = size / 2**20
    if settings.get("zero_optimization.offload_optimizer.device") == "cpu":
        arguments["cpu_offload"] = True
    if (steps := _accumulation_steps(settings, num_replicas)) is not None:
        arguments["gradient_accumulation_steps"] = steps
    raise_errors([f"DeepSpeed's configuration: {error}" for error in errors])
    return arguments


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without keys that are "auto", and without its comments."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != "auto" and not key.startswith("_")
    }


def _precision(settings: Settings) -> dict[str, Any]:
    """Return the arguments for the precision: fp32 unless a section enables another; add the error of both."""
    bf16, fp16 = settings.get("bf16.enabled", False), settings.get("fp16.enabled", False)
    if bf16 and fp16:
        settings.errors.append("bf16 and fp16 are both enabled: enable one")
    if not fp16:
        return {"precision": "bf16" if bf16 else "fp32"}
    return {"precision": "fp16", "initial_scale": 2.0 ** settings.get("fp16.initial_scale_power", 16)}


def _accumulation_steps(settings: Settings, num_replicas: int) -> int | None:
    """Return the accumulation steps, as DeepSpeed derives them from both batch sizes; None if they are not given.

    Adds the error of sizes that contradict each other. The dataloader has the batch size of a replica.
    """
    total, micro = settings.get("train_batch_size"), settings.get("train_micro_batch_size_per_gpu")
    steps = settings.get("gradient_accumulation_steps")
    if None not in (total, micro, steps) and total != micro * steps * num_replicas:
        settings.errors.append(
            f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} × "
            f"gradient_accumulation_steps={steps} × {num_replicas} processes: leave one of them out, or correct it"
        )
    if steps is not None or total is None or micro is None:
        return steps
    if total % (micro * num_replicas):
        settings.errors.append(
            f"train_batch_size={total} is no multiple of train_micro_batch_size_per_gpu={micro} × {num_replicas} "
            "processes: correct one of them"
        )
    return total // (micro * num_replicas)
