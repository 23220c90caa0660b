"""The table of a model that has none here, from the plans that its transformers config carries.

`base_model_tp_plan` says by name how modules are split, `base_model_pp_plan` in which order the parts of the base
model run. Where gradients are summed those plans leave to their reader. Here a region is the module that holds
column-split layers and the row-split one that ends it, of which derived_regions.py makes sure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..pipeline.plan import StagePlan, is_within
from .derived_regions import region_faults, regions_of, whole_modules
from .derived_styles import Styles, sort_styles
from .forward_code import returns_tuple, tensor_inputs
from .layer.embedding import embedding_faults
from .layer_split import widths
from .table import RegionDropout, Table, has_submodule

_GROUPS = "num_key_value_groups"
_KEY_VALUE = ("k_proj", "v_proj")
_DROPOUT = "attention_dropout"


def derived_table(model: nn.Module) -> Table:
    """A table from the plans of a transformers model's config.

    What cannot be split or cannot be cut is told by the table's own faults, so that the other can still be done.

    Args:
        model: whole; may be without memory.

    Raises:
        ValueError: its config has no such plans, or they are not about one list of layers.
    """
    base: Any = getattr(model, "base_model", model)
    config = getattr(base, "config", None)
    splits: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    order: Mapping[str, Any] = getattr(config, "base_model_pp_plan", None) or {}
    stacks = _stacks(base, splits, order)
    if len(stacks) != 1:
        raise ValueError(
            f"the config of a {type(model).__name__} has "
            + (
                f"plans for {stacks}"
                if stacks
                else "no base_model_tp_plan or base_model_pp_plan for its layers"
            )
            + ", so transformers does not say how to split it"
        )
    (stack,) = stacks
    layers = list(base.get_submodule(stack).children())
    embedding = _path_of(base, _called(model, "get_input_embeddings"))
    if embedding is not None and embedding_faults(base.get_submodule(embedding)):
        embedding = None
    head = _head(model) if embedding is not None or not _is_tied(model) else None
    plain = Table(
        stage=StagePlan(
            layers=stack, entry=tuple(order)[: list(order).index(stack)] if stack in order else ()
        ),
        pipeline_faults=tuple(_pipeline_faults(base, layers[0], stack, order)),
        regions=(),
        column=(),
        row=(),
        divisible=(),
        embedding=embedding,
        heads=() if head is None else (head,),
    )
    styles = sort_styles(splits, stack, layers, embedding=embedding)
    faults = [*styles.faults, *region_faults(layers, styles)]
    if not splits:
        faults = ["transformers has no base_model_tp_plan for this model: use tp_size=1"]
    return replace(plain, tensor_faults=tuple(faults)) if faults else _split(plain, layers, styles, config)


def _split(plain: Table, layers: Sequence[nn.Module], styles: Styles, config: Any) -> Table:
    """The table with all that is split within its layers."""
    regions = regions_of(styles)
    partial = tuple(dict.fromkeys((*styles.partial, *whole_modules(layers, styles))))
    owners = tuple(name.rpartition(".")[0] for name in styles.split)
    attentions = [path for path in regions if any(hasattr(_at(layer, path), _GROUPS) for layer in layers)]
    key_value = tuple(
        name for name in styles.column if name.rpartition(".")[0] in attentions and name.endswith(_KEY_VALUE)
    )
    has_copies = len(attentions) == 1 and len(key_value) == len(_KEY_VALUE)
    counts = ("num_attention_heads",) if has_copies else ("num_attention_heads", "num_key_value_heads")
    return replace(
        plain,
        regions=regions,
        column=styles.column,
        row=styles.row,
        gathered=styles.gathered,
        scattered=styles.scattered,
        exits=styles.exits,
        split=styles.split,
        fused=styles.fused,
        partial=partial,
        second_input=_routing(layers, styles),
        attention=_padded(layers, styles, attentions[0], config) if has_copies else {},
        optional=(*regions, *styles.modules, *partial, *owners, *styles.split),
        key_value=key_value if has_copies else (),
        groups=f"{attentions[0]}.{_GROUPS}" if has_copies else None,
        divisible=tuple(
            name for name in counts if attentions and isinstance(getattr(config, name, None), int)
        ),
        dropout=_dropouts(layers, styles),
    )


def _padded(layers: Sequence[nn.Module], styles: Styles, attention: str, config: Any) -> dict[str, str]:
    """The attention with the layer that ends it, where heads can be added: all that is split there is cut by heads."""
    rows = [name for name in styles.row if is_within(name, attention)]
    is_by_head = all(
        widths(layer.get_submodule(name))[1] % getattr(config, count) == 0
        for name in styles.column
        if is_within(name, attention)
        for count in ["num_key_value_heads" if name.endswith(_KEY_VALUE) else "num_attention_heads"]
        for layer in layers
        if has_submodule(layer, name)
    )
    has_others = any(is_within(name, attention) for name in styles.split)
    return {attention: rows[0]} if len(rows) == 1 and is_by_head and not has_others else {}


def _stacks(base: nn.Module, splits: Mapping[str, str], order: Mapping[str, Any]) -> list[str]:
    """The lists of layers that the plans name."""
    named = [*order, *(name.partition(".*")[0] for name in splits if ".*" in name)]
    return [
        name
        for name in dict.fromkeys(named)
        if has_submodule(base, name) and isinstance(base.get_submodule(name), nn.ModuleList)
    ]


def _pipeline_faults(base: nn.Module, layer: nn.Module, stack: str, order: Mapping[str, Any]) -> list[str]:
    if not order:
        return ["transformers has no base_model_pp_plan for this model: use pp_size=1"]
    found = [
        f"base_model_pp_plan does not say when {name} runs, which has parameters: use pp_size=1"
        for name, child in base.named_children()
        if name not in order and any(True for _ in child.parameters())
    ]
    found += [
        f"base_model_pp_plan names {name!r}, and the model has no such module"
        for name in order
        if not has_submodule(base, name)
    ]
    if returns_tuple(layer):
        found.append(
            f"a {type(layer).__name__} hands on more than hidden states to the next, or its code does not tell: use "
            "pp_size=1"
        )
    if further := tensor_inputs(layer):
        found.append(
            f"a {type(layer).__name__} takes {', '.join(further)} besides hidden states, which a stage might not have: "
            "use pp_size=1"
        )
    return found


def _routing(layers: Sequence[nn.Module], styles: Styles) -> dict[str, str]:
    """By module of experts, the name of the weights with which it adds up their outputs."""
    found: dict[str, str] = {}
    for path in styles.experts:
        for layer in layers:
            if has_submodule(layer, path) and (names := tensor_inputs(layer.get_submodule(path))):
                found[path] = names[-1]
    return found


def _dropouts(layers: Sequence[nn.Module], styles: Styles) -> dict[str, RegionDropout]:
    """Dropout on attention's weights, which are split by heads, or by a module on other split activations."""
    found: dict[str, RegionDropout] = {}
    for row in styles.row:
        region = row.rpartition(".")[0]
        for module in filter(None, (_at(layer, region) for layer in layers)):
            drops = [f"{name}.p" for name, child in module.named_modules() if isinstance(child, nn.Dropout)]
            for name in [_DROPOUT] if isinstance(getattr(module, _DROPOUT, None), (int, float)) else drops:
                found.setdefault(region, RegionDropout(probability=f"{region}.{name}", row=row))
    return found


def _head(model: nn.Module) -> str | None:
    """The path of the language-model head, where this class of model has one that can be split."""
    head = _called(model, "get_output_embeddings")
    return _path_of(model, head) if type(head) is nn.Linear else None


def _is_tied(model: nn.Module) -> bool:
    head, embedding = _called(model, "get_output_embeddings"), _called(model, "get_input_embeddings")
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)


def _called(model: Any, method: str) -> nn.Module | None:
    """What a method of transformers' models returns; None where a model has none of what it is about."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _path_of(root: nn.Module, module: nn.Module | None) -> str | None:
    return next((path for path, each in root.named_modules() if each is module), None)


def _at(layer: nn.Module, path: str) -> nn.Module | None:
    return layer.get_submodule(path) if has_submodule(layer, path) else None
