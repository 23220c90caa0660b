"""Derive the table of a model type without one from the parallel plans of its transformers config.

`base_model_tp_plan` gives for each module name how it is sharded, `base_model_pp_plan` the order in which the modules
of the base model run. The plans do not say where gradients are summed. Here a region is the module that contains
column-parallel layers, and the row-parallel layer in it is its end; split_trial.py tells whether that is so.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn import Parameter

from ..cluster.errors import errors_of, raise_errors
from ..cluster.transformers_api import (
    IGNORED_STYLES,
    MODULE_STYLES,
    PARAMETER_STYLES,
    PP_PLAN,
    ROTARY,
    TP_PLAN,
    WITHOUT_GRADIENT,
)
from ..pipeline.stage_plan import StagePlan, is_within
from .layer_split import widths
from .layers.embedding import embedding_errors
from .tables.table import RegionDropout, Table, active_regions, has_submodule, is_any_within, present_modules

# Packed: two projections of equal size in one weight.
_PACKED = 2
_GROUPS = "num_key_value_groups"
_KEY_VALUE = ("k_proj", "v_proj")
_ADVICE = "write a table for this model type (docs/policies.md)"


def derived_table(model: nn.Module) -> Table:
    """Return a table made from the plans of a transformers model's config.

    Errors of tensor parallelism are a field of the table: the model may support sequence parallelism all the same.

    Args:
        model: the full model; may be on the meta device.

    Raises:
        ValueError: its config has no such plans, or they do not describe exactly one list of layers.
    """
    base: Any = getattr(model, "base_model", model)
    config = getattr(base, "config", None)
    splits: Mapping[str, str] = getattr(config, TP_PLAN, None) or {}
    order: Mapping[str, Any] = getattr(config, PP_PLAN, None) or {}
    candidates = dict.fromkeys([*order, *(name.partition(".*")[0] for name in splits if ".*" in name)])
    stacks = [
        name
        for name in present_modules(base, candidates)
        if isinstance(base.get_submodule(name), nn.ModuleList)
    ]
    if len(stacks) != 1:
        plans = f"plans for {stacks}" if stacks else f"no {TP_PLAN} or {PP_PLAN} for its layers"
        raise ValueError(
            f"the config of a {type(model).__name__} has {plans}: no plan describes how to shard it"
        )
    (stack,) = stacks
    layers = list(base.get_submodule(stack).children())
    plain = plain_table(model, stack, tuple(order))
    try:
        return _with_layers(plain, splits, layers, config)
    except ValueError as error:
        return replace(plain, tensor_errors=errors_of(error))


def plain_table(model: Any, stack: str, order: tuple[str, ...] = ()) -> Table:
    """Return the table of a model's embedding and head, without its layers.

    Embeddings that share the weight of the input embedding or of the head are sharded together, or not at all. A head
    is sharded if it is a plain linear layer; one that is tied to embeddings only with them.

    Args:
        model: the full model; may be on the meta device.
        stack: path of the list of layers from the base model.
        order: the modules of the base model in the order in which they run, if it is known.
    """
    base: Any = getattr(model, "base_model", model)
    input_embedding, head = (
        _call_if_implemented(model, f"get_{side}_embeddings") for side in ("input", "output")
    )
    input_weight, head_weight = (getattr(module, "weight", None) for module in (input_embedding, head))
    sharing = {  # embeddings of an encoder and of a decoder, and an unused one that both share
        path: module
        for path, module in base.named_modules()
        if isinstance(module, nn.Embedding)
        and (module.weight is input_weight or module.weight is head_weight)
    }
    sharded = () if any(map(embedding_errors, sharing.values())) else tuple(sharing)
    is_tied = head_weight is input_weight or any(
        embedding.weight is head_weight for embedding in sharing.values()
    )
    shards_head = type(head) is nn.Linear and (bool(sharded) or not is_tied)
    head_path = _path_of(model, head) if shards_head else None
    return Table(
        stage=StagePlan(
            layers=stack,
            entry=order[: order.index(stack)] if stack in order else (),
            everywhere=tuple(present_modules(base, (ROTARY,))),
        ),
        divisible=(),
        embedding=next(iter(sharded), None),
        further_embeddings=sharded[1:],
        heads=() if head_path is None else (head_path,),
    )


def _with_layers(plain: Table, splits: Mapping[str, str], layers: Sequence[nn.Module], config: Any) -> Table:
    """Return the table with the sharding of its layers added.

    Args:
        plain: the table without it.
        splits: transformers' plan: the style of each module or parameter, by its path from the base model.
        layers: the layers of the model, not sharded.
        config: config of the base model.

    Raises:
        ValueError: the plan does not determine it; all reasons at once.
    """
    assert isinstance(plain.stage, StagePlan)
    has_layers = any(is_within(path, plain.stage.layers) for path in splits)
    if not has_layers:  # from 5.24 on the plan may be for the embedding alone
        raise ValueError(f"transformers has no {TP_PLAN} for the layers of this model: use tp_size=1")
    table, errors = _with_plan_entries(plain, splits, layers)
    raise_errors(errors)
    # Modules in a region that the plan leaves replicated get gradients of the local activations only.
    replicated = [
        f"{path}.{name}"
        for layer in layers
        for path in active_regions(layer, table)
        for name in _replicated_modules(layer, path, table)
    ]
    table = replace(table, partial=tuple(dict.fromkeys((*table.partial, *replicated))))
    second_input = {}
    for path in table.exits:
        for layer in layers:
            names = _tensor_inputs(layer.get_submodule(path)) if has_submodule(layer, path) else []
            if names:
                second_input[path] = names[-1]
    table = replace(
        table,
        second_input=second_input,
        optional=tuple(dict.fromkeys((*table.modules, *table.split))),
        dropout=_dropouts(layers, table),
    )
    return _with_heads(table, layers, config)


def _with_heads(table: Table, layers: Sequence[nn.Module], config: Any) -> Table:
    """Return the table with the sharding of attention heads added: which numbers the ranks must divide.

    If it is known which projections have key-value heads, these may be replicated, and query heads padded: `divisible`
    is for attention that cannot be padded.
    """

    def has_groups(path: str) -> bool:
        """Return True if the module at this path in the layers is an attention with grouped key-value heads."""
        modules = [layer.get_submodule(path) for layer in layers if has_submodule(layer, path)]
        return any(hasattr(module, _GROUPS) for module in modules)

    attentions = list(filter(has_groups, table.regions))
    key_value = tuple(
        name for name in table.column if name.rpartition(".")[0] in attentions and name.endswith(_KEY_VALUE)
    )
    can_replicate_heads = len(attentions) == 1 and len(key_value) == len(_KEY_VALUE)
    counts = (
        ("num_attention_heads",) if can_replicate_heads else ("num_attention_heads", "num_key_value_heads")
    )
    divisible = tuple(name for name in counts if attentions and isinstance(getattr(config, name, None), int))
    table = replace(table, divisible=divisible)
    if not can_replicate_heads:
        return table
    return replace(
        table,
        attention=_paddable_attention(layers, table, attentions[0], config),
        key_value=key_value,
        groups=f"{attentions[0]}.{_GROUPS}",
    )


def _with_plan_entries(
    plain: Table, splits: Mapping[str, str], layers: Sequence[nn.Module]
) -> tuple[Table, list[str]]:
    """Return the table with the plan's entries for these layers, and the errors of entries that are not supported.

    Entries that match nothing in a layer are skipped, and so is the token embedding, which is always sharded.
    """
    assert isinstance(plain.stage, StagePlan)
    stack, errors = f"{plain.stage.layers}.*.", list[str]()
    fields: dict[str, list[str]] = {}  # field of `Table` -> paths of modules in a layer
    split, fused = dict[str, int](), dict[str, int]()
    members: dict[str, nn.Module | Parameter] = {}
    for layer in layers:
        members |= {**dict(layer.named_modules()), **dict(layer.named_parameters())}
    for path, style in splits.items():
        if style in IGNORED_STYLES:
            continue
        if not path.startswith(stack):
            if path not in (plain.embedding, *plain.further_embeddings):
                errors.append(f"transformers' plan shards {path} ({style!r}), which is not a layer")
            continue
        pattern = re.compile(r"\d+".join(map(re.escape, path.removeprefix(stack).split("*"))))
        for name in filter(pattern.fullmatch, members):
            member, (dim, min_ndim) = members[name], PARAMETER_STYLES.get(style, (0, 0))
            if isinstance(member, Parameter) and dim and member.ndim >= min_ndim:
                split[name] = max(member.ndim + dim, 0)
            elif isinstance(member, nn.Module) and style in MODULE_STYLES:
                fields.setdefault(MODULE_STYLES[style], []).append(name)
            else:
                errors.append(
                    f"transformers' plan gives {name} ({type(member).__name__}) the style {style!r}, which "
                    "Echelon does not support for it: write a table"
                )
                continue
            if style.startswith("packed"):
                fused[name] = _PACKED
            other_inputs = _tensor_inputs(member) if isinstance(member, nn.Module) else []
            if style == "all_reduce" and other_inputs:
                errors.append(f"{name} takes {other_inputs}: {_ADVICE}")
    owners = (name.rpartition(".")[0] for name in (*fields.get("column", ()), *split))
    names: dict[str, Any] = {field: tuple(of_field) for field, of_field in fields.items()}
    regions = tuple(dict.fromkeys((*owners, *names.get("exits", ()))))
    return replace(plain, regions=regions, split=split, fused=fused, **names), errors


def _tensor_inputs(module: nn.Module) -> list[str]:
    """Return the inputs of a module's forward after the first that may be tensors with gradients."""
    inputs = list(inspect.signature(module.forward).parameters.values())
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [parameter.name for parameter in inputs[1:] if parameter.kind not in kinds]
    return [name for name in named if not any(word in name for word in WITHOUT_GRADIENT)]


def _replicated_modules(layer: nn.Module, path: str, table: Table) -> list[str]:
    """Return the modules inside a region, without the region itself, that have replicated parameters."""
    linear = (*table.column, *table.row, *table.gathered, *table.scattered)
    known = (*linear, *table.exits, *table.partial, *table.split)
    names = (name for name, _ in layer.get_submodule(path).named_parameters() if "." in name)
    replicated = [name for name in names if not is_any_within(f"{path}.{name}", known)]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in replicated))


def _paddable_attention(
    layers: Sequence[nn.Module], table: Table, attention: str, config: Any
) -> dict[str, str]:
    """Return the path of the attention with that of its output layer if its heads can be padded, otherwise {}.

    They can if every sharded weight of the attention consists of equal parts, one for each head.
    """
    rows = [name for name in table.row if is_within(name, attention)]
    columns = [name for name in table.column if is_within(name, attention)]

    def divides_by_heads(layer: nn.Module, name: str) -> bool:
        """Return True if the outputs of a projection are a multiple of its number of heads."""
        heads = "num_key_value_heads" if name.endswith(_KEY_VALUE) else "num_attention_heads"
        _, outputs = widths(layer.get_submodule(name))
        return outputs % getattr(config, heads) == 0

    is_by_head = all(
        divides_by_heads(layer, name) for layer in layers for name in present_modules(layer, columns)
    )
    has_others = any(is_within(name, attention) for name in table.split)
    return {attention: rows[0]} if len(rows) == 1 and is_by_head and not has_others else {}


def _dropouts(layers: Sequence[nn.Module], table: Table) -> dict[str, RegionDropout]:
    """Return the dropout of each region: on attention weights, sharded by heads, or on other sharded activations."""
    dropouts: dict[str, RegionDropout] = {}
    for row in table.row:
        region = row.rpartition(".")[0]
        for layer in layers:
            if not has_submodule(layer, region):
                continue
            if dropout := region_dropout(region, layer.get_submodule(region), row):
                dropouts.setdefault(region, dropout)
    return dropouts


def region_dropout(region: str, module: nn.Module, row: str) -> RegionDropout | None:
    """Return the dropout of a region that ends at a row-parallel layer; None if it has none.

    Args:
        region, row: the paths of the region and of the layer.
        module: the module at the path of the region.
    """
    paths = tuple(f"{region}.{name}" for name in dropouts_of(module))
    return RegionDropout(probability=paths[0] if len(paths) == 1 else paths, row=row) if paths else None


def dropouts_of(module: nn.Module) -> list[str]:
    """Return the paths of a region's dropout probabilities: numbers with "drop" in their names, and nn.Dropout.p."""
    numbers = [
        name
        for name, value in vars(module).items()
        if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    modules = [
        f"{name}.p" for name, child in module.named_modules() if name and isinstance(child, nn.Dropout)
    ]
    return [*numbers, *modules]


def _call_if_implemented(model: Any, method: str) -> nn.Module | None:
    """Call a method of transformers' models and return its result; None if the model does not implement it."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _path_of(root: nn.Module, module: nn.Module | None) -> str | None:
    """Return the path of a module in the root; None if it is not in it."""
    return next((path for path, candidate in root.named_modules() if candidate is module), None)
