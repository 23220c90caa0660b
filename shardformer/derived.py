"""The table of a model that has none here, from the plans that its transformers config carries.

`base_model_tp_plan` says by name how modules are split, `base_model_pp_plan` in which order the parts of the base
model run. Where gradients are summed those plans leave to their reader. Here a region is the module that holds
column-split layers and the row-split one that ends it, of which `region_errors` makes sure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn import Parameter

from ..pipeline.plan import StagePlan, is_within
from .layer_split import widths
from .layers.embedding import embedding_errors
from .layers.forward_code import exit_fault, own_names, returns_tuple, takes_named_inputs, tensor_inputs
from .tables.table import RegionDropout, Table, has_submodule, present

# Packed: two projections of equal length side by side.
_PACKED = 2
# Nothing is done here: whole modules need no style, parameters are found by their own entries, and activations
# outside of regions are never split, whatever the plan proposes for norms.
_IGNORED = ("replicate", "local_params", "sequence_parallel")


@dataclass(kw_only=True)
class Styles:
    """Names of a layer, by what the plan says of them.

    Args:
        column, row: linear layers split by outputs or by inputs.
        gathered: linear layers split by outputs, which are gathered again.
        scattered: linear layers split by inputs, which arrive whole.
        partial: whole modules whose gradients are partial.
        experts: modules that hold experts as parameters and are given routing weights.
        summed: other modules whose outputs are summed over the ranks.
        split: parameters, with the dimension that is cut.
        fused: of `column` and `split`, how many parts each fuses.
        errors: what of the plan is not known here.
    """

    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    split: dict[str, int] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    @property
    def exits(self) -> tuple[str, ...]:
        """Modules other than linear layers that end a region."""
        return (*self.experts, *self.summed)

    @property
    def modules(self) -> tuple[str, ...]:
        """All linear layers that are split, and the modules that end regions."""
        return (*self.column, *self.row, *self.gathered, *self.scattered, *self.exits)


# By style the field of `Styles`, for modules.
_OF_MODULES = {
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "scattered",
    "rowwise_rep": "scattered",
    "replicated_with_grad_allreduce": "partial",
    "mla_kv_a_proj": "partial",
    "moe_tp_experts": "experts",
    "all_reduce": "summed",
}
# By style the dimension that is cut, for parameters, and how many dimensions they must have.
_OF_PARAMETERS = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 2),
    "packed_rowwise": (-1, 2),
}


def sort_styles(
    plan: Mapping[str, str], stack: str, layers: Sequence[nn.Module], *, embedding: str | None
) -> Styles:
    """The plan's entries for what these layers hold; an entry for what none of them holds is passed over.

    Args:
        plan: styles by path from the base model, with `*` for numbers.
        stack: the path of the list of layers.
        layers: the layers.
        embedding: the path of the vocabulary's embedding, which is split whatever the plan says of it.
    """
    found = Styles()
    held: dict[str, nn.Module | Parameter] = {}
    for layer in layers:
        held |= {**dict(layer.named_modules()), **dict(layer.named_parameters())}
    for path, style in plan.items():
        if not path.startswith(f"{stack}.*."):
            if path != embedding and style not in _IGNORED:
                found.errors += (f"transformers' plan splits {path} ({style!r}), which is no layer",)
            continue
        for name in _matching(path.removeprefix(f"{stack}.*."), held):
            _sort(found, name, held[name], style)
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(r"\d+".join(re.escape(part) for part in pattern.split("*")))
    return [name for name in names if expression.fullmatch(name)]


def _sort(found: Styles, name: str, thing: nn.Module | Parameter, style: str) -> None:
    if style in _IGNORED:
        return
    if isinstance(thing, Parameter) and style in _OF_PARAMETERS and thing.ndim >= _OF_PARAMETERS[style][1]:
        found.split[name] = max(thing.ndim + _OF_PARAMETERS[style][0], 0)
    elif isinstance(thing, nn.Module) and style in _OF_MODULES:
        kind = _OF_MODULES[style]
        setattr(found, kind, (*getattr(found, kind), name))
    else:
        found.errors += (
            f"transformers' plan gives {name} ({type(thing).__name__}) the style {style!r}, which is not known here "
            "for it: write a table",
        )
        return
    if style.startswith("packed"):
        found.fused[name] = _PACKED


# Attributes with counts of heads. Code that computes with one would count the heads of other ranks.
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "embed_dim")
_ADVICE = "write a table for this model type"


def regions_of(styles: Styles) -> tuple[str, ...]:
    """The modules that hold split layers and parameters directly."""
    owners = (name.rpartition(".")[0] for name in (*styles.column, *styles.split))
    return tuple(dict.fromkeys((*owners, *styles.exits)))


def region_errors(layers: Sequence[nn.Module], styles: Styles) -> list[str]:
    """Why regions do not start and end where the modules that hold split layers do, each once."""
    found: dict[str, None] = {}
    for layer in layers:
        active = _active(layer, styles)
        found |= dict.fromkeys(
            f"{inner} works on split activations within {outer}, which does too: {_ADVICE}"
            for inner in (*active, *present(layer, (*styles.gathered, *styles.scattered)))
            for outer in active
            if inner != outer and is_within(inner, outer)
        )
        found |= dict.fromkeys(error for path in active for error in _errors(layer, path, styles))
        found |= dict.fromkeys(
            f"{row} is split by its inputs, and nothing beside it by its outputs: {_ADVICE}"
            for row in present(layer, styles.row)
            if row.rpartition(".")[0] not in active
        )
    return list(found)


def whole_modules(layers: Sequence[nn.Module], styles: Styles) -> list[str]:
    """Modules in regions that hold parameters which the plan does not split: their gradients are partial."""
    found: dict[str, None] = {}
    for layer in layers:
        for path in _active(layer, styles):
            found |= dict.fromkeys(f"{path}.{name}" for name in _whole(layer, path, styles))
    return list(found)


def _errors(layer: nn.Module, path: str, styles: Styles) -> list[str]:
    module = layer.get_submodule(path)
    whole = _whole(layer, path, styles)
    rows = [name for name in present(layer, styles.row) if name.rpartition(".")[0] == path]
    own = [name for name, _ in module.named_parameters(recurse=False) if f"{path}.{name}" not in styles.split]
    found = [f"{path}.{name} is whole among split activations: {_ADVICE}" for name in own]
    further = tensor_inputs(module)
    if path in styles.exits:
        found += [f"{path}.{name} is whole among split experts: {_ADVICE}" for name in whole + rows]
        is_known = len(further) <= (path in styles.experts) and takes_named_inputs(module)
        return found if is_known else [*found, f"{path} takes {further or 'inputs without names'}: {_ADVICE}"]
    if further:
        found.append(f"{path} takes {', '.join(further)} besides hidden states: {_ADVICE}")
    if counts := sorted(own_names(module) & {*_HEAD_COUNTS}):
        found.append(f"the code of {path} reads {', '.join(counts)}, of which a rank has a part: {_ADVICE}")
    if len(rows) != 1:
        return [*found, f"{path} has split outputs, and {rows or 'no layer'} to end them: {_ADVICE}"]
    others = [name for name, _ in module.named_children() if f"{path}.{name}" != rows[0]]
    others = [name for name in others if any(True for _ in module.get_submodule(name).parameters())]
    error = exit_fault(
        module, rows[0].rpartition(".")[2], [*others, *dict(module.named_parameters(recurse=False))]
    )
    return [*found, *([f"{path}: {error}: {_ADVICE}"] if error else [])]


def _active(layer: nn.Module, styles: Styles) -> list[str]:
    """The regions of which this layer holds something that is split."""
    held = {*dict(layer.named_modules()), *dict(layer.named_parameters())}
    owners = (name.rpartition(".")[0] for name in (*styles.column, *styles.split) if name in held)
    return list(dict.fromkeys(owners))


def _whole(layer: nn.Module, path: str, styles: Styles) -> list[str]:
    """The modules below a region, without itself, that hold parameters which the plan does not split."""
    known = (*styles.modules, *styles.partial, *styles.split)
    names = (name for name, _ in layer.get_submodule(path).named_parameters() if "." in name)
    whole = [name for name in names if not any(is_within(f"{path}.{name}", each) for each in known)]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in whole))


_GROUPS = "num_key_value_groups"
_KEY_VALUE = ("k_proj", "v_proj")
_DROPOUT = "attention_dropout"


def derived_table(model: nn.Module) -> Table:
    """A table from the plans of a transformers model's config.

    Reasons against the tensor axis and against stages stand in the table apart, so that the other can still be done.

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
    if embedding is not None and embedding_errors(base.get_submodule(embedding)):
        embedding = None
    head = _head(model) if embedding is not None or not _is_tied(model) else None
    plain = Table(
        stage=StagePlan(
            layers=stack, entry=tuple(order)[: list(order).index(stack)] if stack in order else ()
        ),
        pipeline_errors=tuple(_pipeline_errors(base, layers[0], stack, order)),
        regions=(),
        column=(),
        row=(),
        divisible=(),
        embedding=embedding,
        heads=() if head is None else (head,),
    )
    styles = sort_styles(splits, stack, layers, embedding=embedding)
    errors = [*styles.errors, *region_errors(layers, styles)]
    if not splits:
        errors = ["transformers has no base_model_tp_plan for this model: use tp_size=1"]
    return replace(plain, tensor_errors=tuple(errors)) if errors else _split(plain, layers, styles, config)


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


def _pipeline_errors(base: nn.Module, layer: nn.Module, stack: str, order: Mapping[str, Any]) -> list[str]:
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
    """Result of a method of transformers' models; None where a model has nothing for it."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _path_of(root: nn.Module, module: nn.Module | None) -> str | None:
    return next((path for path, each in root.named_modules() if each is module), None)


def _at(layer: nn.Module, path: str) -> nn.Module | None:
    return layer.get_submodule(path) if has_submodule(layer, path) else None
