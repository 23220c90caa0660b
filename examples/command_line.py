"""Common part of the examples' command lines: the plugin's options as flags, and errors reported by one rank.

The flags are made from the signature of HybridParallelPlugin and checked by it, so that all it takes is there.
"""

import argparse
import itertools
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from inspect import Parameter, cleandoc, signature
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

PLUGINS = {
    "torch_ddp": TorchDDPPlugin,
    "torch_ddp_fp16": TorchDDPPlugin,
    "low_level_zero": LowLevelZeroPlugin,
    "hybrid_parallel": HybridParallelPlugin,
}
# Where the examples want something else than the plugin's own default.
DEFAULTS = {"precision": "bf16", "num_microbatches": 4, "max_norm": 1.0, "initial_scale": 2**16}
# By flag, what LowLevelZeroPlugin calls it.
LOW_LEVEL_ZERO_NAMES = {"zero_stage": "stage", "zero_bucket_size_in_m": "reduce_bucket_size_in_m"}
SIZES = ("tp_size", "pp_size")  # see `default_sizes`
FLAG_OF: dict[Any, dict[str, Any]] = {
    bool | str: {"nargs": "?", "const": True},
    bool: {"action": argparse.BooleanOptionalAction},
    list: {"type": int, "nargs": "+"},
    **{kind: {"type": kind} for kind in (int, float, str)},
}
BAD_ARGUMENTS = 2


class Refused(Exception):
    """The arguments cannot be carried out, and the first rank has reported why."""


class FirstRankParser(argparse.ArgumentParser):
    """A parser that speaks on the first rank alone; the others end with the same status."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        if is_first_process():
            super().error(message)
        sys.exit(BAD_ARGUMENTS)

    def print_help(self, file: Any = None) -> None:
        """Print the help."""
        if is_first_process():
            super().print_help(file)


def is_first_process() -> bool:
    """Return True if torchrun made this the first process, or there is no other. Known before any process group."""
    return os.environ.get("RANK", "0") == "0"


def add_plugin_options(parser: argparse.ArgumentParser) -> None:
    """Add `--plugin` and a flag for every option of HybridParallelPlugin; what is not given is None."""
    group = parser.add_argument_group("plugin", "checked by the plugin itself")
    group.add_argument("--plugin", choices=PLUGINS, default="hybrid_parallel")
    descriptions = described(HybridParallelPlugin)
    for name, parameter in plugin_parameters().items():
        default = "what the number of processes allows" if name in SIZES else default_of(parameter)
        text = f"{descriptions.get(name, '')} (default: {default})".strip().replace("%", "%%")
        group.add_argument(f"--{name}", help=text, **FLAG_OF[kind_of(parameter)])


def default_of(parameter: Parameter) -> Any:
    """The value where the flag is not given."""
    return DEFAULTS.get(parameter.name, parameter.default)


def plugin_parameters() -> dict[str, Parameter]:
    """The plugin's options that a command line can say; not a policy, which is an object."""
    parameters = signature(HybridParallelPlugin).parameters
    return {name: parameter for name, parameter in parameters.items() if kind_of(parameter) is not None}


def kind_of(parameter: Parameter) -> Any:
    """A key of FLAG_OF, list for a list of whole numbers; None for what no word can say."""
    hint = parameter.annotation
    if hint == bool | str:
        return hint
    if get_origin(hint) in (Union, UnionType):
        choices = set(get_args(hint)) - {NoneType}
        hint = (
            str if str in choices else choices.pop() if len(choices) == 1 else None
        )  # a word, where one will do
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is not None and get_args(hint) == (int,):
        return list
    return hint if hint in (bool, int, float, str) else None


def described(documented: type) -> dict[str, str]:
    """Descriptions of each argument in the docstring of a class."""
    items = re.findall(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", cleandoc(documented.__doc__ or ""), flags=re.M)
    return {name: " ".join(text.split()) for names, text in items for name in names.split(", ")}


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plugin's options that were given."""
    values = {name: getattr(arguments, name) for name in plugin_parameters()}
    return {name: value for name, value in values.items() if value is not None}


def refused_options(arguments: argparse.Namespace) -> list[str]:
    """An error where options were given that the chosen plugin does not take."""
    own = {
        *signature(PLUGINS[arguments.plugin]).parameters,
        "max_norm",
    }  # without it in DDP, the script clips
    if PLUGINS[arguments.plugin] is LowLevelZeroPlugin:
        own |= LOW_LEVEL_ZERO_NAMES.keys()
    refused = [f"--{name}" for name in given_options(arguments) if name not in own]
    if not refused:
        return []
    return [f"--plugin {arguments.plugin} does not take {', '.join(refused)}: leave out, or take another"]


def default_sizes(world_size: int, tp_size: int | None, pp_size: int | None) -> tuple[int, int]:
    """Tensor and pipeline sizes: 2 each where the number of processes allows, the pipeline first."""
    if pp_size is None:
        pp_size = 2 if world_size % (2 * max(tp_size or 1, 1)) == 0 else 1
    if tp_size is None:
        tp_size = 2 if world_size % (2 * max(pp_size, 1)) == 0 else 1
    return tp_size, pp_size


def make_booster(arguments: argparse.Namespace, world_size: int) -> Booster:
    """The booster that is asked for.

    Raises:
        ValueError: the plugin does not take what was given; all errors at once, on every rank.
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
    shares_out = (arguments.wp_size or 1) > 1  # over ranks that have neither a part of a layer nor other ones
    given = [arguments.tp_size, arguments.pp_size]
    given = [1 if size is None and shares_out else size for size in given]
    tp_size, pp_size = default_sizes(world_size // max(arguments.sp_size or 1, 1), *given)
    ratio = getattr(arguments, "gradient_checkpoint_ratio", 0)
    if 0 < ratio <= 1:  # the script that has this flag tells of another number, and refuses it
        options["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(
            gradient_checkpointing_ratio=ratio
        )
    return Booster(plugin=HybridParallelPlugin(**{**options, "tp_size": tp_size, "pp_size": pp_size}))


def booster_or_errors(
    arguments: argparse.Namespace, world_size: int
) -> tuple[Booster, list[str]] | tuple[None, list[str]]:
    """The booster and no errors, or None and what the plugin says against it."""
    try:
        return make_booster(arguments, world_size), []
    except ValueError as error:
        _, *errors = str(error).split("\n- ")
        return None, errors or [str(error)]


def range_errors(
    arguments: argparse.Namespace, lowest: Mapping[str, float], highest: Mapping[str, float]
) -> list[str]:
    """Numbers that were given and lie out of their range; what is None is passed over."""
    errors = []
    for name, low in lowest.items():
        value, high = getattr(arguments, name), highest.get(name, math.inf)
        if value is not None and not low <= value <= high:
            allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            errors.append(f"--{name} {value} must be {allowed}")
    return errors


def batch_errors(arguments: argparse.Namespace, booster: Booster, names: Sequence[str]) -> list[str]:
    """Why batches of these sizes, of all processes together, cannot be dealt out and cut."""
    errors = []
    num_replicas = booster.plugin.data_rank[1]
    is_cut = not isinstance(booster.plugin, TorchDDPPlugin) and arguments.microbatch_size is None
    parts = (arguments.num_microbatches or DEFAULTS["num_microbatches"]) if is_cut else 1
    for name in names:
        size = getattr(arguments, name)
        if size % num_replicas:
            errors.append(f"--{name} {size} does not divide by {num_replicas} data-parallel ranks")
        elif size < num_replicas * parts:
            errors.append(
                f"--{name} {size} is too small for {num_replicas} data-parallel rank(s) with {parts} microbatches "
                f"each: use at least {num_replicas * parts}, or fewer --num_microbatches"
            )
    return errors


def max_norm_of(arguments: argparse.Namespace) -> float:
    """The norm to clip to, for plugins that leave clipping to the script."""
    return DEFAULTS["max_norm"] if arguments.max_norm is None else arguments.max_norm


def refuse(errors: Sequence[str]) -> None:
    """Go on where no rank found an error. All-gather over the world.

    Raises:
        Refused: there are errors, which the first rank has reported.
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
