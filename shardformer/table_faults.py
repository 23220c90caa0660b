"""Why a model cannot be split by a table over so many ranks. What the split is: table_policy.py."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ..cluster.mesh import divisors
from ..pipeline.plan import StagePlan
from .layer.embedding import embedding_faults
from .layer.loss import reads_weights
from .layer.parallel_module import native_faults
from .table import Table, is_within

ATTENTIONS_FAULT = (  # of the config or a call
    "output_attentions=True in {} gives each rank the attention of its own heads alone: leave it out or use "
    "tp_size=1"
)


def table_faults(
    model: nn.Module, table: Table, *, plan: StagePlan, ends: Collection[str], ranks: int
) -> list[str]:
    """All reasons why the table does not split this model over so many ranks; empty when it does.

    Args:
        model: the whole model, not yet split; may be without memory.
        table: how it is to be split.
        plan: the table's plan, seen from the model.
        ends: paths of the embedding and, where there is one, of the head.
        ranks: the size of the tensor axis.
    """
    if ranks == 1:
        return []
    layers = {
        f"{plan.layers}.{name}": layer for name, layer in model.get_submodule(plan.layers).named_children()
    }
    if missing := _missing(model, layers, table, ends):
        return missing  # the other checks would stumble over them
    return [
        *_head_faults(model.config, table, ranks),
        *_width_faults(layers, table, f"{plan.layers}.*", ranks),
        *_class_faults(model, layers, table, ends),
        *_region_faults(layers, table),
        *_tie_faults(model, _split_paths(layers, table, ends)),
        *_reading_faults(model, ends),
    ]


def widths(projection: Any) -> tuple[int, int]:
    """Input and output features of an nn.Linear or of transformers' Conv1D."""
    rows, columns = projection.weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def has_submodule(model: nn.Module, name: str) -> bool:
    """Whether a module has a sub-module of this path."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _missing(
    model: nn.Module, layers: Mapping[str, nn.Module], table: Table, ends: Collection[str]
) -> list[str]:
    """Names that match nothing, each once."""
    named = (*table.regions, *table.column, *table.row, *table.partial)
    found = [
        f"the table names {name!r} in a layer, and {path} has no such module"
        for name in named
        for path in [next((path for path, layer in layers.items() if not has_submodule(layer, name)), None)]
        if path is not None
    ]
    found += [
        f"the table names {name!r}, and the model has no such module"
        for name in ends
        if not has_submodule(model, name)
    ]
    return found


def _head_faults(config: Any, table: Table, ranks: int) -> list[str]:
    found = [
        f"{name}={count} is not divisible by tp_size={ranks}: use one of tp_size={divisors(count)}"
        for name, count in ((name, getattr(config, name)) for name in table.divisible)
        if count % ranks
    ]
    heads = config.num_key_value_heads if table.key_value else ranks
    if heads % ranks and ranks % heads:
        sizes = divisors(config.num_attention_heads)
        found.append(
            f"num_key_value_heads={heads} neither divides tp_size={ranks} nor is divided by it: "
            f"use one of tp_size={[size for size in sizes if heads % size == 0 or size % heads == 0]}"
        )
    return found


def _width_faults(layers: Mapping[str, nn.Module], table: Table, place: str, ranks: int) -> list[str]:
    found = []
    for name in (*table.column, *table.row):
        projections = [layer.get_submodule(name) for layer in layers.values()]
        if not all(hasattr(projection, "weight") for projection in projections):
            continue  # told by _class_faults
        shapes = {widths(projection) for projection in projections}
        if len(shapes) > 1:
            found.append(
                f"{place}.{name} differs in width between layers, {sorted(shapes)}: all must be equal"
            )
            continue
        inputs, outputs = shapes.pop()
        width = inputs if name in table.row else outputs // table.fused.get(name, 1)
        if name not in table.key_value and width % ranks:
            found.append(
                f"{place}.{name} is {width} wide, which is not divisible by tp_size={ranks}: "
                f"use one of tp_size={divisors(width)}"
            )
    return found


def _class_faults(
    model: nn.Module, layers: Mapping[str, nn.Module], table: Table, ends: Collection[str]
) -> list[str]:
    """Modules of another kind than what can be split."""
    found = []
    kinds = {type(layer).__name__ for layer in layers.values()}
    if len(kinds) > 1:
        found.append(f"the layers are of several classes, {sorted(kinds)}, and a table is for one")
    for name in (*table.column, *table.row):
        told: dict[str, list[str]] = {}
        for path, layer in layers.items():
            for fault in native_faults(layer.get_submodule(name), nn.Linear, Conv1D):
                told.setdefault(fault, []).append(f"{path}.{name}")
        found += [f"{paths[0]}{_and_more(paths)} {fault}" for fault, paths in told.items()]
    for path in ends:
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding):
            found += [f"{path} {fault}" for fault in embedding_faults(module)]
        else:
            found += [f"{path} {fault}" for fault in native_faults(module, nn.Linear)]
    return found


def _and_more(paths: list[str]) -> str:
    return f" (and {len(paths) - 1} more like it)" if len(paths) > 1 else ""


def _region_faults(layers: Mapping[str, nn.Module], table: Table) -> list[str]:
    """Whole parameters among split activations: each rank would have a part of their gradient, and nobody sum it."""
    known = (*table.column, *table.row, *table.partial)
    found: dict[str, list[str]] = {}
    for path, layer in layers.items():
        for name, _ in layer.named_parameters():
            if table.region_of(name) and not any(is_within(name, module) for module in known):
                found.setdefault(name, []).append(f"{path}.{name}")
    return [
        f"{paths[0]}{_and_more(paths)} works on split activations in the region {table.region_of(name)!r}, and the "
        "table does not name it: name its module in column, row or partial"
        for name, paths in found.items()
    ]


def _split_paths(layers: Mapping[str, nn.Module], table: Table, ends: Collection[str]) -> set[str]:
    return {*ends, *(f"{path}.{name}" for path in layers for name in (*table.column, *table.row))}


def _tie_faults(model: nn.Module, split: Collection[str]) -> list[str]:
    """Layers that share a weight with one that is split, and would compute with a part of it."""
    holders: dict[Parameter, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            for parameter in module.parameters(recurse=False):
                holders.setdefault(parameter, []).append(path)
    return [
        f"{path} shares a weight with {next(other for other in paths if other in split)}, which is split, and would "
        "compute with a part of it: untie it, or use a policy that splits it too"
        for paths in holders.values()
        if any(path in split for path in paths)
        for path in paths
        if path not in split
    ]


def _reading_faults(model: nn.Module, ends: Collection[str]) -> list[str]:
    found = []
    if len(ends) > 1 and reads_weights(model):
        found.append(
            f"the forward of this {type(model).__name__} reads a weight itself (a fused loss does), and the head's is "
            "split: use transformers' own forward, or tp_size=1"
        )
    if getattr(model.config, "output_attentions", False):
        found.append(ATTENTIONS_FAULT.format("the model's config"))
    return found
