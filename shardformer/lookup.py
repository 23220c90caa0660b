"""What a model and its layers have of what a table names. Why it may not be split is table_faults.py."""

from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .adapted import plain
from .head_order import Heads
from .table import Table


def widths(projection: Any) -> tuple[int, int]:
    """Input and output features of an nn.Linear or of transformers' Conv1D, perhaps inside of LoRA."""
    projection = plain(projection)
    rows, columns = projection.weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def heads_of(config: Any, layer: nn.Module, table: Table, ranks: int) -> Heads:
    """The heads of a layer's attention; of one that is not yet split."""

    def number(path: str | None, name: str) -> int:
        found: Any = getattr(config, name) if path is None else reduce(getattr, path.split("."), layer)
        return int(found)

    query = number(table.query_heads, "num_attention_heads")
    key_value = number(table.key_value_heads, "num_key_value_heads") if table.has_key_value_heads else query
    return Heads(query=query, key_value=key_value, ranks=ranks)


def native_class(projection: nn.Module, table: Table) -> type[nn.Module] | None:
    """The layer's class, inside of LoRA, where the table says that it computes what a plain linear layer does."""
    kind = type(plain(projection))
    return kind if kind.__name__ in table.native and issubclass(kind, nn.Linear) else None


def has_submodule(model: nn.Module, name: str) -> bool:
    """Whether a module has a sub-module of this path."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def has_parameter(module: nn.Module, name: str) -> bool:
    """Whether a module has a parameter of this path."""
    owner, _, own_name = name.rpartition(".")
    return has_submodule(module, owner) and own_name in module.get_submodule(owner)._parameters


def present(root: nn.Module, names: Iterable[str]) -> list[str]:
    """Those names that are sub-modules, in their order."""
    return [name for name in names if has_submodule(root, name)]


def active_regions(layer: nn.Module, table: Table) -> list[str]:
    """The regions that a layer has: something of what it holds is split, and lies in no region further in."""
    held = {*dict(layer.named_modules()), *dict(layer.named_parameters())}
    named = (name for name in (*table.column, *table.row, *table.split) if name in held)
    found = {table.region_of(name) for name in named}
    return [region for region in table.regions if region in found]


def layers_of(model: nn.Module, stacks: Iterable[str]) -> dict[str, nn.Module]:
    """All layers of these lists of layers, by their paths; a module that is no list is one layer."""
    found: dict[str, nn.Module] = {}
    for stack in stacks:
        module = model.get_submodule(stack)
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            found |= {f"{stack}.{name}": layer for name, layer in module.named_children()}
        else:
            found[stack] = module
    return found


def split_paths(model: nn.Module, table: Table, *, stacks: Sequence[str], ends: Collection[str]) -> set[str]:
    """The paths of all modules whose parameters a table splits. See `table_faults` for the arguments."""
    owners = (name.rpartition(".")[0] for name in (*table.split, *table.biases))
    names = (*table.column, *table.row, *table.gathered, *table.scattered, *owners)
    return {*ends, *(f"{path}.{name}" for path in layers_of(model, stacks) for name in names)}
