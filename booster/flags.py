"""The plugin's options as flags of a script's command line, made from the fields of HybridConfig.

parser = echelon.ArgumentParser()
echelon.add_plugin_arguments(parser, precision="bf16", num_microbatches=4)
arguments = parser.parse_args()
echelon.launch_from_torch()
booster = Booster(plugin=echelon.plugin_from_arguments(arguments))
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import signature
from types import NoneType
from typing import Any, NoReturn, get_args

import torch.distributed as dist

from ..cluster.coordinator import DistCoordinator
from ..cluster.errors import errors_of
from ..cluster.options import described
from ..plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from ..plugins.base import Plugin
from ..plugins.hybrid_config import HybridConfig
from ..plugins.low_level_zero import ZeroConfig
from ..shardformer.recompute import PipelineGradientCheckpointConfig

PLUGINS: dict[str, type[Plugin]] = {
    "hybrid_parallel": HybridParallelPlugin,
    "low_level_zero": LowLevelZeroPlugin,
    "torch_ddp": TorchDDPPlugin,
    "torch_fsdp": TorchFSDPPlugin,
}
BAD_ARGUMENTS = 2  # the exit status, as of argparse
# A default of the script is dropped where an option of the same kind is given on the command line.
_KINDS = (
    {"tp_size", "pp_size", "sp_size", "dp_size", "wp_size", "ep_size"},
    {"num_microbatches", "microbatch_size"},
)
# Options of HybridParallelPlugin that LowLevelZeroPlugin has under another name.
_ZERO_NAMES = {option.metadata.get("name"): option.name for option in fields(ZeroConfig)}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, of which only the first rank prints help and errors; all ranks exit alike.

    Args:
        arguments: of argparse's parser. Lines of the description are kept as they are, unless another formatter is
            given.
    """

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | arguments)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; the first rank prints the message."""
        if _is_first_rank():
            super().error(message)
        sys.exit(BAD_ARGUMENTS)

    def print_help(self, file: Any = None) -> None:
        """Print the help on the first rank."""
        if _is_first_rank():
            super().print_help(file)


def add_plugin_arguments(
    parser: argparse.ArgumentParser, *, without: Sequence[str] = (), **defaults: Any
) -> None:
    """Add `--plugin` and a flag for every option of HybridParallelPlugin, but `custom_policy`.

    `--gradient_checkpoint_config` takes the ratio of layers that are recomputed. The values are checked by the plugin.

    Args:
        parser: the script's parser.
        without: options that get no flag, as those that the parser has under the same name.
        defaults: the script's own defaults, of options and of "plugin". A plugin that has no such option ignores its
            default. Sizes of axes are one layout: a size on the command line drops all default sizes.

    Raises:
        ValueError: a default is for no option.
    """
    flags = {option.name: flag for option in fields(HybridConfig) if (flag := _flag(option.type)) is not None}
    flags = {name: flag for name, flag in flags.items() if name not in without}
    if unknown := defaults.keys() - flags.keys() - {"plugin"}:
        raise ValueError(f"no options of HybridParallelPlugin with a flag: {', '.join(sorted(unknown))}")
    group = parser.add_argument_group("plugin", "checked by the plugin itself")
    group.add_argument("--plugin", choices=PLUGINS, default=defaults.pop("plugin", "hybrid_parallel"))
    texts = described(HybridConfig)
    for option in fields(HybridConfig):
        if option.name in flags:
            default = defaults.get(option.name, option.default)
            text = f"{texts[option.name]} (default: {default})".strip().replace("%", "%%")
            group.add_argument(f"--{option.name}", help=text, **flags[option.name])
    parser.set_defaults(plugin_defaults=defaults, plugin_flags=tuple(flags))


def plugin_from_arguments(arguments: argparse.Namespace, **options: Any) -> Plugin:
    """Make the plugin that the flags of `add_plugin_arguments` describe; on all ranks, after `launch_from_torch`.

    Where the arguments are invalid, the first rank prints all errors, and all ranks exit with status 2.

    Args:
        arguments: the parsed command line.
        options: further options of the plugin, as `custom_policy`.
    """
    plugin_class = PLUGINS[arguments.plugin]
    flags = {name: getattr(arguments, name) for name in arguments.plugin_flags}
    flags = {name: value for name, value in flags.items() if value is not None}
    names = _names_of(plugin_class)
    if refused := [f"--{name}" for name in flags if name not in names]:
        _exit([f"--plugin {arguments.plugin} does not take {', '.join(refused)}: leave out, or take another"])
    values = {
        name: value
        for name, value in arguments.plugin_defaults.items()
        if name in names and not _is_dropped(name, flags)
    }
    values |= flags
    precision = values.pop("precision", None) if plugin_class is TorchDDPPlugin else None
    by_option = {names[name]: value for name, value in values.items()}
    if twice := sorted(by_option.keys() & options.keys()):
        _exit([f"{name} is an option of the script and a flag or default: leave out one" for name in twice])
    try:
        plugin = plugin_class(**by_option, **options)
        if isinstance(plugin, TorchDDPPlugin) and precision is not None:
            plugin.set_mixed_precision(precision)
    except ValueError as error:
        _exit(errors_of(error))
    return plugin


def _is_dropped(name: str, flags: Mapping[str, Any]) -> bool:
    """Return True for a default of the script that gives way to flags of the same kind."""
    return any(name in kind and kind & flags.keys() for kind in _KINDS)


def _names_of(plugin_class: type[Plugin]) -> Mapping[str, str]:
    """Return by flag the names of the options that a plugin takes."""
    names = {name: name for name in signature(plugin_class).parameters}
    if plugin_class is LowLevelZeroPlugin:
        names |= {flag: name for flag, name in _ZERO_NAMES.items() if flag is not None}
    return names | {"precision": "precision"}  # of TorchDDPPlugin it is an argument of the booster


def _flag(kind: Any) -> dict[str, Any] | None:
    """Return the arguments of `add_argument` for an option's type; None for objects that cannot be flags."""
    if kind == bool | str:
        return {"nargs": "?", "const": True}
    kinds = set(get_args(kind) or [kind]) - {NoneType}
    if any(get_args(member) == (int,) for member in kinds):  # Sequence[int]
        return {"type": int, "nargs": "+"}
    if PipelineGradientCheckpointConfig in kinds:
        return {"type": _recomputed, "metavar": "RATIO"}
    if str in kinds or all(isinstance(member, str) for member in kinds):  # a literal's words
        return {"type": str}
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kinds.pop()} if kinds in ({int}, {float}) else None


def _recomputed(ratio: str) -> PipelineGradientCheckpointConfig:
    """Parse the value of `--gradient_checkpoint_config`."""
    try:
        return PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=float(ratio))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{ratio!r} must be a ratio of layers, from 0 to 1") from error


def _is_first_rank() -> bool:
    """Return True on the first rank of torchrun, or without torchrun. Needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def _exit(errors: Sequence[str]) -> NoReturn:
    """Print the errors on the first rank, leave the process group, and exit with status 2."""
    if _is_first_rank():
        for error in errors:
            print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        DistCoordinator().destroy()
    sys.exit(BAD_ARGUMENTS)
