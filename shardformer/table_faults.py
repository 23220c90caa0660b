"""Why a model cannot be split by a table over so many ranks. What the split is: table_policy.py."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ..cluster.mesh import divisors
from ..pipeline.plan import is_within
from .adapted import plain
from .head_order import HeadOrder
from .layer.embedding import embedding_faults
from .layer.loss import reads_weights
from .layer.norm import norm_faults
from .layer.parallel_module import native_faults
from .lookup import (
    active_regions,
    has_parameter,
    has_submodule,
    heads_of,
    layers_of,
    native_class,
    present,
    widths,
)
from .lora_faults import adapter_faults
from .table import Table

ATTENTIONS_FAULT = (  # of the config or a call
    "output_attentions=True in {} gives each rank the attention of its own heads alone: leave it out or use "
    "tp_size=1"
)


def table_faults(
    model: nn.Module, table: Table, *, stacks: Sequence[str], ends: Collection[str], ranks: int
) -> list[str]:
    """All reasons why the table does not split this model over so many ranks; empty when it does.

    Args:
        model: the whole model, not yet split; may be without memory.
        table: how it is to be split.
        stacks: paths of the model's lists of layers.
        ends: paths of the embeddings and, where there is one, of the head.
        ranks: the size of the tensor axis.
    """
    if ranks == 1:
        return []
    layers = layers_of(model, stacks)
    config = getattr(model, "config", None)
    settings = _setting_faults(config, table)
    # The other checks would stumble over these.
    if adapters := adapter_faults(model, layers, table, ends):
        return [*settings, *adapters]
    if missing := [
        *_missing(model, layers, table, ends),
        *_missing_attributes(layers, table),
        *_missing_settings(config, table),
    ]:
        return [*settings, *missing]
    return [
        *settings,
        *_head_faults(config, layers, table, ranks),
        *_divide_faults(layers, table, ranks),
        *(fault for stack in stacks for fault in _stack_faults(model, stack, table, ranks)),
        *_fused_faults(config, layers, table, ranks),
        *_class_faults(model, layers, table, ends),
        *_region_faults(layers, table),
        *_input_faults(layers, table),
        *_reading_faults(model, ends),
    ]


def _missing(
    model: nn.Module, layers: Mapping[str, nn.Module], table: Table, ends: Collection[str]
) -> list[str]:
    """Names that match nothing, each once."""
    found = [
        f"the table names {name!r} in a layer, and {path} has no such module{' or parameter' * (name in table.partial)}"
        for name in table.modules
        for path in [next((path for path, layer in layers.items() if _lacks(layer, name, table)), None)]
        if path is not None
    ]
    found += [
        f"the table names {name!r} in a layer, and {path} has no such parameter"
        for name in (*table.split, *table.biases)
        for path, layer in layers.items()
        for owner, _, own_name in [name.rpartition(".")]
        if has_submodule(layer, owner) and own_name not in dict(layer.get_submodule(owner).named_parameters())
        if name not in table.optional
    ]
    found += [
        f"the table names {name!r}, and the model has no such module"
        for name in ends
        if not has_submodule(model, name)
    ]
    return found


def _missing_attributes(layers: Mapping[str, nn.Module], table: Table) -> list[str]:
    """Attributes that are named and not there, though their module is; each once."""
    single = [path for path in (table.groups, table.query_heads, table.key_value_heads) if path is not None]
    return [
        f"the table names {name!r} in a layer, and {paths[0]}{_and_more(paths)} has no attribute of this name"
        for name in dict.fromkeys((*table.divide, *table.divide_key_value, *single))
        for paths in [[path for path, layer in layers.items() if not _reads(layer, name)]]
        if paths
    ]


def _missing_settings(config: Any, table: Table) -> list[str]:
    """Numbers that are looked up in the config, for want of a path to an attribute, and not there."""
    counts_heads = (
        table.attention
        or table.has_key_value_heads
        or any(isinstance(each, HeadOrder) for each in table.fused.values())
    )
    wanted = {
        name: "leave it out of divisible" for name in table.divisible if table.column and not table.attention
    }
    if counts_heads and table.query_heads is None:
        wanted["num_attention_heads"] = "name the layer's own attribute in query_heads"
    if table.has_key_value_heads and table.key_value_heads is None:
        wanted["num_key_value_heads"] = "name the layer's own attribute in key_value_heads"
    return [
        f"the table takes {name} from the model's config, "
        f"and {'the model has none' if config is None else f'a {type(config).__name__} has no such setting'}: {advice}"
        for name, advice in wanted.items()
        if getattr(config, name, None) is None
    ]


def _reads(layer: nn.Module, path: str) -> bool:
    """Whether a layer has an attribute, or not even the module that it would be on."""
    *owners, name = path.split(".")
    owner: Any = layer
    for each in owners:
        if not hasattr(owner, each):
            return True
        owner = getattr(owner, each)
    return hasattr(owner, name)


def _lacks(layer: nn.Module, name: str, table: Table) -> bool:
    """Whether a layer has no module of this name, and nothing that the table calls optional explains it."""

    def lacks(path: str) -> bool:
        return not has_submodule(layer, path) and not has_parameter(layer, path)

    return lacks(name) and not any(is_within(name, path) and lacks(path) for path in table.optional)


def _setting_faults(config: Any, table: Table) -> list[str]:
    return [
        f"{name}={getattr(config, name)!r} in the model's config does not go with tensor parallelism: use "
        f"{name}={needed!r} or tp_size=1"
        for name, needed in table.needed.items()
        if getattr(config, name, needed) != needed
    ]


def _head_faults(config: Any, layers: Mapping[str, nn.Module], table: Table, ranks: int) -> list[str]:
    if not table.column or table.attention:
        return []  # all heads are those of parts, or are padded
    found = [
        f"{name}={count} is not divisible by tp_size={ranks}: use one of tp_size={divisors(count)}"
        for name, count in ((name, getattr(config, name)) for name in table.divisible)
        if count % ranks
    ]
    if not table.has_key_value_heads:
        return found
    heads = heads_of(config, next(iter(layers.values())), table, ranks).key_value
    if heads % ranks and ranks % heads:
        sizes = divisors(config.num_attention_heads)
        name = (table.key_value_heads or "num_key_value_heads").rpartition(".")[2]
        found.append(
            f"{name}={heads} neither divides tp_size={ranks} nor is divided by it: "
            f"use one of tp_size={[size for size in sizes if heads % size == 0 or size % heads == 0]}"
        )
    return found


def _divide_faults(layers: Mapping[str, nn.Module], table: Table, ranks: int) -> list[str]:
    """Counts that the layers' code reads and that do not divide; where the config tells them, it is told by that."""
    if table.divisible or table.attention:
        return []
    found: dict[tuple[str, int], list[str]] = {}
    for path, layer in layers.items():
        for name in table.divide:
            owner, _, attribute = name.rpartition(".")
            if has_submodule(layer, owner):
                count = getattr(layer.get_submodule(owner), attribute)
                found.setdefault((name, count), []).append(f"{path}.{name}")
    return [
        f"{paths[0]}={count}{_and_more(paths)} is not divisible by tp_size={ranks}: use one of "
        f"tp_size={divisors(count)}"
        for (_, count), paths in found.items()
        if count % ranks
    ]


def _stack_faults(model: nn.Module, stack: str, table: Table, ranks: int) -> list[str]:
    layers = list(layers_of(model, [stack]).values())
    kinds = sorted({type(layer).__name__ for layer in layers})
    mixed = [f"the layers are of several classes, {kinds}, and a table is for one"] if len(kinds) > 1 else []
    place = f"{stack}.*"
    return [*_width_faults(layers, table, place, ranks), *_length_faults(layers, table, place, ranks), *mixed]


def _width_faults(layers: Sequence[nn.Module], table: Table, place: str, ranks: int) -> list[str]:
    found = []
    rows = (*table.row, *table.scattered)
    for name in (*table.column, *table.gathered, *rows):
        projections = [layer.get_submodule(name) for layer in layers if has_submodule(layer, name)]
        if not projections or not all(hasattr(projection, "weight") for projection in projections):
            continue  # told by _class_faults
        shapes = {widths(projection) for projection in projections}
        if len(shapes) > 1:
            found.append(
                f"{place}.{name} differs in width between layers, {sorted(shapes)}: all must be equal"
            )
            continue
        inputs, outputs = shapes.pop()
        fused = table.fused.get(name, 1)
        if name in table.key_value or isinstance(fused, HeadOrder):
            continue  # told by _head_faults and _fused_faults
        if table.region_of(name) in table.attention or name in table.attention.values():
            continue  # padded
        width = inputs if name in rows else outputs // fused
        if width % ranks:
            found.append(
                f"{place}.{name} is {width} wide, which is not divisible by tp_size={ranks}: "
                f"use one of tp_size={divisors(width)}"
            )
    return found


def _fused_faults(config: Any, layers: Mapping[str, nn.Module], table: Table, ranks: int) -> list[str]:
    """Projections whose heads do not go over the ranks; of the first layer that has each, since all are alike."""
    found = []
    for name, order in table.fused.items():
        path = next((path for path, layer in layers.items() if has_submodule(layer, name)), None)
        if path is None or not isinstance(order, HeadOrder):
            continue
        heads = heads_of(config, layers[path], table, ranks)
        _, outputs = widths(layers[path].get_submodule(name))
        found += heads.fused_faults(f"{path}.{name}", order, outputs)
    return found


def _length_faults(layers: Sequence[nn.Module], table: Table, place: str, ranks: int) -> list[str]:
    """Split parameters that the ranks do not divide."""
    held = [dict(layer.named_parameters()) for layer in layers]
    lengths = {
        (name, parameters[name].shape[dim] // blocks)
        for name, dim in table.split.items()
        for blocks in [table.fused.get(name, 1)]
        for parameters in held
        if name in parameters and isinstance(blocks, int) and name not in table.key_value
        if table.region_of(name) not in table.attention  # padded
    }
    return [
        f"{place}.{name} is {length} long where it is cut, which is not divisible by tp_size={ranks}: use one of "
        f"tp_size={divisors(length)}"
        for name, length in sorted(lengths)
        if length % ranks
    ]


def _class_faults(
    model: nn.Module, layers: Mapping[str, nn.Module], table: Table, ends: Collection[str]
) -> list[str]:
    """Modules of another kind than what can be split."""
    found = []
    for name in (*table.column, *table.row, *table.gathered, *table.scattered):
        told: dict[str, list[str]] = {}
        for path, layer in layers.items():
            for held in present(layer, [name]):
                module = plain(layer.get_submodule(held))
                known = native_class(module, table) or nn.Linear
                for fault in native_faults(module, known, Conv1D):
                    told.setdefault(fault, []).append(f"{path}.{name}")
        found += [f"{paths[0]}{_and_more(paths)} {fault}" for fault, paths in told.items()]
    found += [
        f"{path}.{name} {fault}"
        for name in table.norms
        for path, layer in layers.items()
        for held in present(layer, [name])
        for fault in norm_faults(layer.get_submodule(held))
    ]
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
    known = (*table.column, *table.row, *table.split, *table.partial, *table.whole, *table.norms)
    found: dict[str, list[str]] = {}
    for path, layer in layers.items():
        regions = active_regions(layer, table)
        for name, _ in layer.named_parameters():
            if table.region_of(name) in regions and not any(is_within(name, each) for each in known):
                found.setdefault(name, []).append(f"{path}.{name}")
    return [
        f"{paths[0]}{_and_more(paths)} works on split activations in the region {table.region_of(name)!r}, and the "
        "table does not name it: name its module in column, row, norms or partial"
        for name, paths in found.items()
    ]


def _input_faults(layers: Mapping[str, nn.Module], table: Table) -> list[str]:
    """Other inputs that a region's forward does not have: nobody would sum their gradients, or cut them by heads."""
    inputs = [
        *table.second_input.items(),
        *((region, name) for region, names in table.by_head.items() for name in names),
    ]
    return [
        f"the table names the input {name!r} of {path}.{region}, whose inputs are {list(known)}"
        for region, name in inputs
        for path, layer in layers.items()
        for held in present(layer, [region])
        for known in [inspect.signature(layer.get_submodule(held).forward).parameters]
        if name not in known
    ]


def tie_faults(model: nn.Module, split: Collection[str]) -> list[str]:
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
    has_head = any(not isinstance(model.get_submodule(path), nn.Embedding) for path in ends)
    if has_head and reads_weights(model):
        found.append(
            f"the forward of this {type(model).__name__} reads a weight itself (a fused loss does), and the head's is "
            "split: use transformers' own forward, or tp_size=1"
        )
    if getattr(getattr(model, "config", None), "output_attentions", False):
        found.append(ATTENTIONS_FAULT.format("the model's config"))
    return found
