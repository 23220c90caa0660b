"""Command-line parts that all examples share: the plugin's options as flags, and errors reported by the first rank.

The flags are generated from the options of HybridParallelPlugin, and the plugin checks their values.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import torch.distributed as dist

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    TorchDDPPlugin,
)
from echelon.cluster.options import described
from echelon.plugins.hybrid_config import HybridConfig
from echelon.plugins.low_level_zero import ZeroConfig

PLUGINS = {
    "torch_ddp": TorchDDPPlugin,
    "torch_ddp_fp16": TorchDDPPlugin,
    "low_level_zero": LowLevelZeroPlugin,
    "hybrid_parallel": HybridParallelPlugin,
}
# Defaults of the examples that differ from the plugin's own.
DEFAULTS = {"precision": "bf16", "num_microbatches": 4, "max_norm": 1.0, "initial_scale": 2**16}
# Flags that are named differently in LowLevelZeroPlugin.
LOW_LEVEL_ZERO_NAMES = {each.metadata.get("name"): each.name for each in fields(ZeroConfig)}
SIZES = ("tp_size", "pp_size")  # see `default_sizes`
FLAG_OF: dict[Any, dict[str, Any]] = {
    bool | str: {"nargs": "?", "const": True},
    bool: {"action": argparse.BooleanOptionalAction},
    list: {"type": int, "nargs": "+"},
    **{kind: {"type": kind} for kind in (int, float, str)},
}
BAD_ARGUMENTS = 2


class Refused(Exception):
    """Invalid arguments; the first rank has reported the errors."""


class FirstRankParser(argparse.ArgumentParser):
    """Argument parser that prints on the first rank only; all ranks exit with the same status."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; the first rank prints the message."""
        if is_first_process():
            super().error(message)
        sys.exit(BAD_ARGUMENTS)

    def print_help(self, file: Any = None) -> None:
        """Print the help on the first rank."""
        if is_first_process():
            super().print_help(file)


def is_first_process() -> bool:
    """Return True on the first rank of torchrun, or without torchrun. Needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def add_plugin_options(parser: argparse.ArgumentParser) -> None:
    """Add `--plugin` and a flag for every option of HybridParallelPlugin; flags default to None."""
    group = parser.add_argument_group("plugin", "checked by the plugin itself")
    group.add_argument("--plugin", choices=PLUGINS, default="hybrid_parallel")
    descriptions = described(HybridConfig)
    for name, parameter in plugin_parameters().items():
        default = "chosen by the number of processes" if name in SIZES else default_of(parameter)
        text = f"{descriptions[name]} (default: {default})".strip().replace("%", "%%")
        group.add_argument(f"--{name}", help=text, **FLAG_OF[kind_of(parameter)])


def default_of(parameter: Parameter) -> Any:
    """Return the default value of an option in the examples."""
    return DEFAULTS.get(parameter.name, parameter.default)


def plugin_parameters() -> dict[str, Parameter]:
    """Return the plugin's options that have a flag; objects such as a policy have none."""
    parameters = signature(HybridParallelPlugin).parameters
    return {name: parameter for name, parameter in parameters.items() if kind_of(parameter) is not None}


def kind_of(parameter: Parameter) -> Any:
    """Return the key of FLAG_OF for a parameter, `list` for a list of integers; None if it cannot be a flag."""
    hint = parameter.annotation
    if hint == bool | str:
        return hint
    if get_origin(hint) in (Union, UnionType):
        choices = set(get_args(hint)) - {NoneType}
        # A string if the union allows one.
        hint = str if str in choices else choices.pop() if len(choices) == 1 else None
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is not None and get_args(hint) == (int,):
        return list
    return hint if hint in (bool, int, float, str) else None


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plugin's options that were given on the command line."""
    values = {name: getattr(arguments, name) for name in plugin_parameters()}
    return {name: value for name, value in values.items() if value is not None}


def refused_options(arguments: argparse.Namespace) -> list[str]:
    """Return an error if options were given that the chosen plugin does not take."""
    # TorchDDPPlugin has no max_norm: the script clips.
    allowed = {*signature(PLUGINS[arguments.plugin]).parameters, "max_norm"}
    if PLUGINS[arguments.plugin] is LowLevelZeroPlugin:
        allowed |= LOW_LEVEL_ZERO_NAMES.keys()
    refused = [f"--{name}" for name in given_options(arguments) if name not in allowed]
    if not refused:
        return []
    return [f"--plugin {arguments.plugin} does not take {', '.join(refused)}: leave out, or take another"]


def default_sizes(world_size: int, tp_size: int | None, pp_size: int | None) -> tuple[int, int]:
    """Return default tensor and pipeline sizes: 2 each if they divide the number of processes, the pipeline first."""
    if pp_size is None:
        pp_size = 2 if world_size % (2 * max(tp_size or 1, 1)) == 0 else 1
    if tp_size is None:
        tp_size = 2 if world_size % (2 * max(pp_size, 1)) == 0 else 1
    return tp_size, pp_size


def make_booster(arguments: argparse.Namespace, world_size: int) -> Booster:
    """Make the booster that the arguments request.

    Raises:
        ValueError: the plugin refuses the arguments; all errors at once, on every rank.
    """
    if arguments.plugin == "torch_ddp":
        return Booster(plugin=TorchDDPPlugin(), mixed_precision="fp32")
    if arguments.plugin == "torch_ddp_fp16":
        return Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16")
    options = DEFAULTS | given_options(arguments)
    if arguments.microbatch_size is not None and arguments.num_microbatches is None:
        del options["num_microbatches"]
    if arguments.plugin == "low_level_zero":
        named = {LOW_LEVEL_ZERO_NAMES.get(name, name): value for name, value in options.items()}
        return Booster(plugin=LowLevelZeroPlugin(**named))
    shards_weights = (arguments.wp_size or 1) > 1  # excludes tensor and pipeline parallelism
    given = [arguments.tp_size, arguments.pp_size]
    given = [1 if size is None and shards_weights else size for size in given]
    tp_size, pp_size = default_sizes(world_size // max(arguments.sp_size or 1, 1), *given)
    ratio = getattr(arguments, "gradient_checkpoint_ratio", 0)
    if 0 < ratio <= 1:  # the script with this flag reports other numbers itself
        options["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(
            gradient_checkpointing_ratio=ratio
        )
    return Booster(plugin=HybridParallelPlugin(**{**options, "tp_size": tp_size, "pp_size": pp_size}))


def booster_or_errors(
    arguments: argparse.Namespace, world_size: int
) -> tuple[Booster, list[str]] | tuple[None, list[str]]:
    """Return the booster and no errors, or None and the plugin's errors."""
    try:
        return make_booster(arguments, world_size), []
    except ValueError as error:
        _, *errors = str(error).split("\n- ")
        return None, errors or [str(error)]


def range_errors(
    arguments: argparse.Namespace, lowest: Mapping[str, float], highest: Mapping[str, float]
) -> list[str]:
    """Return errors for numbers out of their range; None values are skipped."""
    errors = []
    for name, low in lowest.items():
        value, high = getattr(arguments, name), highest.get(name, math.inf)
        if value is not None and not low <= value <= high:
            allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            errors.append(f"--{name} {value} must be {allowed}")
    return errors


def batch_errors(arguments: argparse.Namespace, booster: Booster, names: Sequence[str]) -> list[str]:
    """Return errors for global batch sizes that replicas or microbatches do not divide."""
    errors = []
    num_replicas = booster.plugin.data_rank[1]
    is_cut = not isinstance(booster.plugin, TorchDDPPlugin) and arguments.microbatch_size is None
    num_microbatches = (arguments.num_microbatches or DEFAULTS["num_microbatches"]) if is_cut else 1
    for name in names:
        size = getattr(arguments, name)
        if size % num_replicas:
            errors.append(f"--{name} {size} does not divide by {num_replicas} data-parallel ranks")
        elif size < num_replicas * num_microbatches:
            errors.append(
                f"--{name} {size} is too small for {num_replicas} data-parallel rank(s) with {num_microbatches} "
                f"microbatches each: use at least {num_replicas * num_microbatches}, or fewer --num_microbatches"
            )
    return errors


def max_norm_of(arguments: argparse.Namespace) -> float:
    """Return the maximum gradient norm, for plugins that leave clipping to the script."""
    return DEFAULTS["max_norm"] if arguments.max_norm is None else arguments.max_norm


def refuse(errors: Sequence[str]) -> None:
    """Raise if any rank found an error. All-gather over the world.

    Raises:
        Refused: there are errors; the first rank has reported them.
    """
    if report_errors(errors, program=Path(sys.argv[0]).name):
        raise Refused


def report_errors(errors: Sequence[str], *, program: str) -> bool:
    """Return True if any rank found an error; the first rank reports all of them. All-gather over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(errors))
    distinct = dict.fromkeys(itertools.chain.from_iterable(found))
    if dist.get_rank() == 0:
        for error in distinct:
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    return bool(distinct)
