"""Conversion of InternEvo configurations to arguments of HybridParallelPlugin, by one table of keys.

Keys have their meaning of InternEvo 0.5 (its launch.py and parallel_context.py); docs/coming-from-internevo.md
lists them.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from ..cluster.errors import raise_errors
from ..shardformer.recompute import PipelineGradientCheckpointConfig
from .configuration import Key, Settings, read_configuration
from .hybrid_config import HybridConfig

_LOG = logging.getLogger("echelon")


_KIND_OF = {int: "an integer", float: "a number", bool: "a bool"}
_TYPES = {field.name: (get_args(field.type) or (field.type,))[0] for field in fields(HybridConfig)}


def _unchanged(argument: str) -> Key:
    """Return the key of values that an option of the plugin takes unchanged."""
    return Key(_KIND_OF[_TYPES[argument]], argument)


_ONE_SIZE = Key(allowed=(1,), why="is not available: use 1, and from_config(config, ep_size=...)")
KEYS = {
    "parallel.zero1.size": Key("an integer"),
    "parallel.zero1.fsdp": Key(
        allowed=(False,), why="is not supported by this plugin: use TorchFSDPPlugin, or leave it out"
    ),
    "parallel.tensor.size": Key("an integer"),
    "parallel.tensor.mode": Key("a str"),
    "parallel.sequence_parallel": Key("a bool"),
    "parallel.weight.size": Key("an integer"),
    "parallel.weight.overlap": Key("a bool"),
    "parallel.weight.memory_pool": Key("a bool"),  # torch's allocator keeps buffers either way
    "parallel.pipeline.size": Key("an integer"),
    "parallel.pipeline.mode": Key("a str"),
    "parallel.pipeline.interleaved_overlap": Key("a bool"),
    "parallel.sequence_2D.enable": Key(
        allowed=(False,),
        why=(
            "is not available: use HybridParallelPlugin's own sequence_parallelism_mode, 'all_to_all' or "
            "'ring_attn'"
        ),
    ),
    "parallel.expert.size": _ONE_SIZE,
    "parallel.expert_weight.size": _ONE_SIZE,
    "num_chunks": Key("an integer"),
    "data.micro_num": _unchanged("num_microbatches"),
    "data.gradient_accumulation": Key("an integer"),
    "hybrid_zero_optimizer.overlap_sync_grad": _unchanged("overlap_communication"),
    "hybrid_zero_optimizer.zero_overlap_communication": _unchanged("overlap_communication"),
    "hybrid_zero_optimizer.overlap_sync_param": _unchanged("overlap_allgather"),
    # InternEvo compares it with numbers of elements, not with bytes.
    "hybrid_zero_optimizer.reduce_bucket_size": Key("a number"),
    "hybrid_zero_optimizer.clip_grad_norm": _unchanged("max_norm"),
    "grad_scaler.fp16.initial_scale": _unchanged("initial_scale"),
    "grad_scaler.fp16.min_scale": _unchanged("min_scale"),
    "grad_scaler.fp16.growth_interval": _unchanged("growth_interval"),
    "grad_scaler.growth_factor": _unchanged("growth_factor"),
    "grad_scaler.backoff_factor": _unchanged("backoff_factor"),
    "grad_scaler.max_scale": _unchanged("max_scale"),
    "grad_scaler.hysteresis": _unchanged("hysteresis"),
    "model.dtype": Key(),
    "model.num_chunks": Key("an integer"),
    "model.checkpoint": Key("a bool, or a number from 0 to 1"),
    "model.parallel_output": _unchanged("parallel_output"),
    "model.use_flash_attn": _unchanged("enable_flash_attention"),
    "model.embed_grad_scale": Key(
        allowed=(1,), why="is not available: scale gradients in the model itself, and use 1"
    ),
    "loss.label_smoothing": Key(
        allowed=(0,), why="is not available: give execute_pipeline a criterion with it, and use 0 here"
    ),
    "use_fp32_norm": Key(
        allowed=(False,),
        why="is not available: norms compute in the model's format, with float32 masters; use False",
    ),
}
# The keys of the section `parallel`.
PARALLEL_KEYS = sorted({path.split(".")[1] for path in KEYS if path.startswith("parallel.")})
# Further keys of each section, which become no argument. None: any name but a likely misspelling of a known key.
IGNORED: dict[str, tuple[str, ...] | None] = {
    "": (  # given to Echelon as objects (optimizer, schedulers, batches), or handled by the training script
        *("JOB_NAME", "DO_ALERT", "model_type", "adam", "lr_scheduler", "beta2_scheduler", "ckpt", "monitor"),
        *(
            "alert_address",
            "enable_tb",
            "tensorboard",
            "tensorboard_folder",
            "resume_tb_folder",
            "batch_count",
        ),
        *("cudnn_deterministic", "cudnn_benchmark", "generation", "gradient_handler"),
    ),
    "parallel.weight": ("launch_allgather_before", "forward_overlap_per"),
    "hybrid_zero_optimizer": ("use_split_tensor_optim", "all_gather_size"),
    "loss": ("moe_loss_coeff", "op_type"),
    **dict.fromkeys(("data", "model", "parallel.sequence_2D", "parallel.expert", "parallel.expert_weight")),
}

# Arguments of a mode, besides the sizes. isp shards no layer over its `tensor` ranks: only the sequence.
_REGIONS = {
    "enable_sequence_parallelism": True,
    "sequence_parallelism_mode": "split_gather",
    "enable_sequence_overlap": True,
}
MODES: dict[str, dict[str, Any]] = {
    "mtp": {},
    "msp": _REGIONS,
    "fsp": {**_REGIONS, "enable_sequence_regather": True},
    "isp": {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
}
# Pipeline modes, with the schedule for one stage per rank and for several.
_SCHEDULES = {"1f1b": ("1f1b", "interleaved"), "zbh1": ("zbh1", None), "zbv": ("zbv", "zbv")}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
# The configuration key of each argument, to name it in errors of the plugin. The first of several keys is the newer.
_KEY_OF = {
    **{key.argument: path for path, key in reversed(KEYS.items()) if key.argument is not None},
    "tp_size": "tensor.size",
    "sp_size": "tensor.size",
    "pp_size": "pipeline.size",
    "wp_size": "weight.size",
    "zero_size": "zero1.size",
    "num_model_chunks": "num_chunks",
}


def plugin_arguments(config: Mapping[str, Any] | str | Path, **others: Any) -> dict[str, Any]:
    """Return the keyword arguments of HybridParallelPlugin for an InternEvo configuration.

    Missing keys get the plugin's defaults, except `zero1` and `data.micro_num`, which get InternEvo's: all ranks,
    and 1. Sections that do not concern the plugin (`adam`, `ckpt`, the model's sizes, …) are listed once in an info
    line of the logger "echelon". No communication.

    Args:
        config: a configuration, the dictionary of its `parallel` section alone, or the path of a .py or .json file.
        others: further sections by name, and arguments of the plugin, which override those of the configuration.

    Raises:
        ValueError: keys or values are unknown or unsupported; all errors at once.
    """
    config = read_configuration(config, "InternEvo")
    sections = {path.split(".")[0] for path in KEYS} | {*PARALLEL_KEYS}
    errors = [
        f"{name} is given twice, in the configuration and as an argument: give one"
        for name in others
        if name in config
    ]
    config |= {name: value for name, value in others.items() if name in sections}
    # The section `parallel` may be given alone, or its keys as arguments: they stand beside the other sections then.
    at_top = {name: config.pop(name) for name in PARALLEL_KEYS if name in config}
    if "parallel" in config:
        errors += [f"{name} is given twice, also in parallel: leave one out" for name in at_top]
        settings = Settings(config, KEYS, IGNORED, errors)
    else:
        config = {"parallel": at_top} | config
        settings = Settings(config, KEYS, IGNORED, errors, name=lambda path: path.removeprefix("parallel."))
    arguments = _layout(settings) | _microbatches(settings) | _other_options(settings)
    raise_errors([f"InternEvo's configuration: {error}" for error in errors])
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    if settings.ignored_paths and is_first_rank:
        _LOG.info(
            "InternEvo's configuration: these are not arguments of the plugin (optimizer, model, data and "
            "files are given to Echelon as objects): %s",
            ", ".join(settings.ignored_paths),
        )
    return arguments | {name: value for name, value in others.items() if name not in sections}


def with_configuration_keys(error: str, arguments: Mapping[str, Any]) -> str:
    """Return an error of the plugin with a second line: the configuration keys of the arguments that it names.

    Args:
        error: the plugin's error.
        arguments: the arguments that the configuration set.
    """
    names = [name for name in _KEY_OF if name in arguments and re.search(rf"\b{name}\b", error)]
    if not names:
        return error
    translations = {name: f"{name}={arguments[name]} is {_KEY_OF[name]}" for name in names}
    size, wp_size = arguments.get("zero_size", -1), arguments.get("wp_size", 1)
    if "zero_size" in names and size > 1 and wp_size > 1:
        translations["zero_size"] = (
            f"zero_size={size} is zero1.size={size // wp_size} times weight.size={wp_size}"
        )
    return f"{error}\nin InternEvo's configuration {', '.join(translations.values())}"


def _layout(settings: Settings) -> dict[str, Any]:
    """Return the arguments for the sizes of all axes, the sequence's mode, ZeRO and the pipeline; add errors."""
    mode, size = settings.get("parallel.tensor.mode", "mtp"), settings.get("parallel.tensor.size", 1)
    if mode not in MODES:
        settings.refuse("parallel.tensor.mode", mode, f"must be one of {', '.join(map(repr, MODES))}")
        mode = "mtp"
    shards_sequences = mode != "mtp"
    requested = settings.get("parallel.sequence_parallel")
    if requested is not None and size > 1 and requested != shards_sequences:
        why = f"contradicts tensor.mode={mode!r}, which decides: leave it out"
        settings.refuse("parallel.sequence_parallel", requested, why)
    arguments: dict[str, Any] = {"tp_size": 1, "sp_size": size} if mode == "isp" else {"tp_size": size}
    arguments |= MODES[mode] if size > 1 else {}
    wp_size = settings.get("parallel.weight.size", 1)
    if wp_size != 1:
        if mode != "isp":
            why = f"needs tensor=dict(mode='isp'), and the mode is {mode!r}: use 1, or that mode"
            settings.refuse("parallel.weight.size", wp_size, why)
        arguments["wp_size"] = wp_size
        # InternEvo's default, not the plugin's.
        arguments["wp_overlap"] = settings.get("parallel.weight.overlap", False)
    # `zero1` counts ranks with the same weight shard; `zero_size` counts all neighbours, wp_size times as many.
    zero_size = settings.get("parallel.zero1.size", -1)
    if zero_size <= 0:
        zero_size = -1
    elif zero_size > 1:
        zero_size *= wp_size
    return arguments | {"zero_stage": 1, "zero_size": zero_size} | _pipeline(settings)


def _pipeline(settings: Settings) -> dict[str, Any]:
    """Return the arguments for the pipeline's size, schedule and chunks; add errors of unknown or unfit ones."""
    in_model, at_top = settings.get("model.num_chunks"), settings.get("num_chunks")
    if None not in (in_model, at_top) and in_model != at_top:
        settings.errors.append(f"num_chunks={at_top} and model.num_chunks={in_model} differ: give one")
    chunks = next((number for number in (in_model, at_top) if number is not None), 1)
    mode, size = settings.get("parallel.pipeline.mode", "1F1B"), settings.get("parallel.pipeline.size", 1)
    arguments: dict[str, Any] = {"pp_size": size}
    styles = _SCHEDULES.get(mode.lower())
    if styles is None:
        names = ", ".join(repr(known.upper()) for known in _SCHEDULES)
        settings.refuse("parallel.pipeline.mode", mode, f"must be one of {names}")
        return arguments
    for_one, for_several = styles
    style = for_several if chunks > 1 else for_one
    if style is None or (style == "zbv" and chunks > 2):
        why = f"and num_chunks={chunks} do not go together: ZBH1 has 1 chunk, ZBV 2"
        settings.refuse("parallel.pipeline.mode", mode, why)
    elif size != 1:  # without a pipeline InternEvo ignores these keys
        arguments["pp_style"] = style
        if style == "interleaved":
            overlap = settings.get("parallel.pipeline.interleaved_overlap")
            arguments |= {"num_model_chunks": chunks} | ({} if overlap is None else {"overlap_p2p": overlap})
    return arguments


def _microbatches(settings: Settings) -> dict[str, Any]:
    """Return the number of microbatches of a step; empty without a section `data`."""
    if not settings.has("data"):
        return {}
    count, accumulation = settings.get("data.micro_num", 1), settings.get("data.gradient_accumulation")
    # With a pipeline InternEvo ignores gradient_accumulation.
    if settings.get("parallel.pipeline.size", 1) == 1 and accumulation not in (None, count):
        why = f"must be micro_num={count} without a pipeline"
        settings.refuse("data.gradient_accumulation", accumulation, why)
    return {"num_microbatches": count}


def _other_options(settings: Settings) -> dict[str, Any]:
    """Return the arguments that take a value unchanged, and those for precision, recomputation and the bucket size."""
    arguments = settings.arguments()
    zero = "hybrid_zero_optimizer"
    overlap, older = (
        settings.get(f"{zero}.overlap_sync_grad"),
        settings.get(f"{zero}.zero_overlap_communication"),
    )
    if None not in (overlap, older) and overlap != older:
        why = f"is the older name of overlap_sync_grad={overlap}: give one"
        settings.refuse(f"{zero}.zero_overlap_communication", older, why)
    if settings.has(f"{zero}.reduce_bucket_size"):
        arguments["zero_bucket_size_in_m"] = settings.get(f"{zero}.reduce_bucket_size") / 2**20
    if settings.get("model.checkpoint"):
        ratio = float(settings.get("model.checkpoint"))
        arguments["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(
            gradient_checkpointing_ratio=ratio
        )
    if settings.has("model"):
        arguments["precision"] = _precision(settings)
    return arguments


def _precision(settings: Settings) -> str | None:
    """Return the precision for `model.dtype`, InternEvo's float16 by default; None, with an error added, if invalid."""
    dtype = settings.get("model.dtype")
    name = "float16" if dtype is None else str(dtype).removeprefix("torch.")
    if isinstance(dtype, (str, torch.dtype, type(None))) and name in _DTYPES:
        return _DTYPES[name]
    why = f"must be one of {', '.join(f'torch.{known}' for known in _DTYPES)}"
    if name == "tf32":
        why = (
            "is float32 with faster matrix products: use torch.float32, and "
            "torch.set_float32_matmul_precision('high')"
        )
    settings.refuse("model.dtype", dtype, why)
    return None
