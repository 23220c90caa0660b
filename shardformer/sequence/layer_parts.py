"""Which modules and parameters of a layer compute on a part of the sequence, by its table, and why none may."""

import re
from collections.abc import Iterable

from torch import nn

from ...pipeline.plan import is_within
from ..forward_code import is_readable, own_names, slices
from ..table import Table, active_regions, present

# Attributes in code that knows of more than one position, or of their number.
_MIXING = re.compile(
    "(un)?flatten|(un)?squeeze|view|reshape|permute|transpose|chunk|split|roll|shape|size|mean|sum|cumsum|gather|"
    "index_select|pad|conv[12]d"
)
# Parts of names of modules that compute each position on its own.
_BY_POSITION = ("Norm", "Dropout", "DropPath", "LayerScale", "Linear", "Conv1D", "Identity", "Activation")
_BY_POSITION_OF = ("torch.nn.modules.activation", "transformers.activations")
# Classes whose code does so without harm: OPT's puts the tokens of all samples in one row, and back.
_CHECKED = ("OPTDecoderLayer",)
SEQUENCE_INSTEAD = (
    "leave enable_sequence_parallelism out, or use a sequence_parallelism_mode on the sequence axis"
)


def whole_paths(table: Table, layer: nn.Module) -> list[str]:
    """The modules that are given whole sequences, with the regions in them as without sequence parallelism.

    Those that hold experts, which are given tokens without their places; those that use what enters a region whole
    besides; and linear layers outside of regions that are split.
    """
    holders = [name.rpartition(".")[0] for name in present(layer, table.exits)]
    others = present(layer, (*table.joined, *table.gathered, *table.scattered))
    return list(dict.fromkeys((*holders, *others)))


def is_any_within(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a path lies in, or is, one of these modules."""
    return any(is_within(path, prefix) for prefix in prefixes)


def parameters_of_parts(table: Table, layer: nn.Module) -> list[str]:
    """The paths of parameters that are used with a part of the sequence, but for biases of row-split layers."""
    apart = (*whole_paths(table, layer), *active_regions(layer, table), *table.column, *table.row)
    split = (*table.split, *table.biases)
    behind = [name for name in table.whole if not is_any_within(name, whole_paths(table, layer))]
    return [
        name
        for name, _ in layer.named_parameters()
        if is_any_within(name, behind) or not is_any_within(name, (*apart, *split))
    ]


def layer_part_faults(table: Table, layer: nn.Module) -> list[str]:
    """Why a layer cannot compute on parts of a sequence between its regions; empty where it can. Its code is read.

    Args:
        table: of the model.
        layer: the native one.
    """
    kind = type(layer).__name__
    apart = (*whole_paths(table, layer), *active_regions(layer, table))
    found = []
    if "" in whole_paths(table, layer):
        found.append(
            f"{kind} holds experts itself, which take tokens without their places: {SEQUENCE_INSTEAD}"
        )
    if getattr(layer, "chunk_size_feed_forward", 0):
        found.append(
            f"{kind} has chunk_size_feed_forward={layer.chunk_size_feed_forward}, which cuts sequences too: set it to 0"
        )
    for name, module in layer.named_modules():
        if is_any_within(name, apart) or is_any_within(name, table.row):
            continue
        where = f"{kind}.{name}" if name else kind
        if not list(module.children()) and not is_by_position(module):
            found.append(f"{where} is a {type(module).__name__}, which may mix positions: {SEQUENCE_INSTEAD}")
        elif list(module.children()) and (mixing := _mixing(module)):
            found.append(
                f"the code of {where} {mixing}, and may know of the whole sequence: {SEQUENCE_INSTEAD}"
            )
    return found


def is_by_position_behind_loops(module: nn.Module) -> bool:
    """Whether the code of a module's forward, behind its last loop or all of it, knows of no other position."""
    return is_readable(module) and not any(map(_MIXING.fullmatch, own_names(module, behind_loops=True)))


def _mixing(module: nn.Module) -> str:
    """What a module's code does that may mix positions; nothing where none of it can."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).__name__ in _CHECKED:
        return ""
    if not is_readable(module):
        return "cannot be read"
    if used := sorted(filter(_MIXING.fullmatch, own_names(module))):
        return f"uses {', '.join(used)}"
    return "takes slices" if slices(module) else ""


def is_by_position(module: nn.Module) -> bool:
    """Whether a module without children computes each position on its own, as the name of its class says."""
    kind = type(module)
    return kind.__module__ in _BY_POSITION_OF or any(part in kind.__name__ for part in _BY_POSITION)
