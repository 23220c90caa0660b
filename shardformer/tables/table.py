"""Tables: the names of a model's modules and parameters, by how they are sharded. table_policy.py makes policies.

Paths are relative to one layer, except for those of embeddings, heads and `stage`. A name that matches nothing is an
error, unless the table marks it as optional.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...cluster.errors import raise_errors
from ...pipeline.stage_plan import StagePlan, is_within
from .heads import HeadOrder


@dataclass(frozen=True, kw_only=True)
class RegionDropout:
    """Dropout on sharded activations, whose random numbers must differ between ranks.

    Args:
        probability: path of the attribute with its probability; several for several dropouts.
        row: the row-parallel layer that ends the region.
    """

    probability: str | tuple[str, ...]
    row: str

    def is_used(self, layer: Any) -> bool:
        """Return True if a probability in the layer is above 0."""
        paths = (self.probability,) if isinstance(self.probability, str) else self.probability
        return any(attribute(layer, path) > 0 for path in paths)


@dataclass(frozen=True, kw_only=True)
class PartStages:
    """A pipeline over the layers of one part, for a model that consists of several models.

    Args:
        part: path of the part.
        entry, leading, everywhere: modules that run before its layers, see `StagePlan`; paths from the base model.
        optional: modules of `leading` that some models lack.
    """

    part: str
    entry: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Names of the modules and parameters of one family of models, by how they are sharded.

    Args:
        stage: the stage plan, with paths of the layers from the base model: lists of layers, or a module that is one
            layer. For a model of several parts: the parts whose layers a pipeline may cut. The first part that
            a class has is used.
        parts: models inside the model by their paths from the base model, each with a `config` and a table of its
            own; None takes the table of its model type. Parts that a class lacks are skipped.
        regions: modules with replicated hidden states as input and sharded activations inside. A region may be
            a linear layer of `column`. In layers with nested regions (experts in an MLP) only the inner one is used.
        column: linear layers sharded by output features (column-parallel).
        row: linear layers sharded by input features (row-parallel); each ends a region.
        attention: regions whose sharded activations are heads, each with the row-parallel layer that ends it. If the
            ranks do not divide the number of heads, padded heads of zeros are added, in `split` and `biases` too.
            Without this field the ranks must divide it.
        query_heads: path of the attribute with the number of query heads, of any module in a layer; None is the
            config's `num_attention_heads`.
        joined: for regions that also use their unsharded input (ALBERT's attention adds it to its output): the
            column-parallel layers that take the input, in the order of their calls. Each is an entry of the region.
        whole: modules inside a region that work on replicated activations, after its end.
        second_input: by region, the name of a second replicated input (the encoder states of cross attention).
        optional: modules and sharded parameters that some layers or models lack; they, and all names below them, are
            skipped there.
        exits: modules other than linear layers whose outputs are partial sums (experts): they are all-reduced, which
            ends a region like a row-parallel layer.
        by_head: by region, the names of inputs that have an entry for each query head (position biases), each with
            the dimension of the heads, which may be flattened with the batch; two more follow it. Each rank takes
            the entries of its heads. Inputs with one entry for all heads, or with other dimensions, are not
            sliced. Attention masks (batch, heads, queries, keys) need not be named, unless they are made of `biases`.
            Their gradients are summed over the ranks.
        fused: modules of `column` and parameters of `split` that fuse several projections: a number of projections of
            equal size, or, in `column`, an order of query, key and value heads. 1: every head, or feature, has its
            own query, key and value side by side.
        key_value: names in `column`, `split` and `norms` with one block per key-value head.
        key_value_heads: path of the attribute with the number of key-value heads; None is the config's
            `num_key_value_heads`.
        groups: path of the attribute "query heads per key-value head"; None if no layer reads one.
        divide: paths of attributes that the layer's code reads as local counts; divided by the number of ranks.
            An attribute of a module's config is changed for this module only.
        divide_key_value: the same for numbers of key-value heads, at least one per rank.
        divisors: names in `divide` by which the layer's code also divides unsharded widths.
        divisible: names of config settings that the ranks must divide, if `attention` is empty.
        split: parameters inside a region that are sharded without replacing their module, each with the dimension.
        biases: parameters outside of regions with a value per head (position biases), each with the sharded dimension.
        shared_biases: the same outside of the layers, by paths from the base model; skipped if a model lacks them.
        native: names of classes among `column` and `row` that compute the same as a plain linear layer.
        needed: required values of config settings: with other values the layers compute something that the table
            does not describe.
        partial: replicated modules or single parameters inside a region: their gradients are summed over the ranks.
        norms: root-mean-square norms inside a region over all heads together: their mean of squares is reduced over
            the ranks.
        dropout: by region, dropout on its sharded activations.
        gathered: column-parallel linear layers outside of regions, whose outputs are gathered.
        scattered: row-parallel linear layers outside of regions, whose inputs are unsharded.
        embedding: path of the token embedding from the base model; None leaves it replicated.
        further_embeddings: more token embeddings, mostly tied to the first; skipped if a class lacks them.
        heads: paths of language-model heads from the full model; a class has at most one of them.
        older: tables that replace this one for older releases of transformers, each by the path (from the base model)
            of a module that only the older release has.
        tensor_errors: reasons why models of this table cannot be sharded over tensor ranks of any number.
        pipeline_errors: reasons why they cannot be cut into stages.

    Raises:
        ValueError: the names contradict each other; all contradictions at once.
    """

    stage: StagePlan | tuple[PartStages, ...]
    parts: Mapping[str, "Table | None"] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    query_heads: str | None = None
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    second_input: Mapping[str, str] = field(default_factory=dict)
    exits: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    by_head: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    fused: Mapping[str, int | HeadOrder] = field(default_factory=dict)
    key_value: tuple[str, ...] = ()
    key_value_heads: str | None = None
    groups: str | None = None
    divide: tuple[str, ...] = ()
    divide_key_value: tuple[str, ...] = ()
    divisors: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ("num_attention_heads",)
    split: Mapping[str, int] = field(default_factory=dict)
    biases: Mapping[str, int] = field(default_factory=dict)
    shared_biases: Mapping[str, int] = field(default_factory=dict)
    native: tuple[str, ...] = ()
    needed: Mapping[str, object] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    dropout: Mapping[str, RegionDropout] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    embedding: str | None = None
    further_embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    older: Mapping[str, "Table"] = field(default_factory=dict)
    tensor_errors: tuple[str, ...] = ()
    pipeline_errors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        raise_errors(self._errors())

    def region_of(self, name: str) -> str | None:
        """Return the innermost region that contains a path of the layer, or None."""
        return max((region for region in self.regions if is_within(name, region)), key=len, default=None)

    @property
    def has_key_value_heads(self) -> bool:
        """True if the table gives key-value heads a sharding of their own."""
        return bool(self.key_value) or any(isinstance(order, HeadOrder) for order in self.fused.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of a layer that the table names, and the owners of sharded parameters. Each once."""
        owners = (name.rpartition(".")[0] for name in (*self.split, *self.biases))
        linear = (*self.column, *self.row, *self.gathered, *self.scattered)
        inside = (*self.exits, *self.partial, *self.norms, *self.whole)
        return tuple(dict.fromkeys((*self.regions, *linear, *inside, *owners)))

    def _errors(self) -> list[str]:
        """List errors of names in a wrong field, missing in another field, or without effect."""
        columns = (*self.column, *self.split)
        # By field: its names, and the field (or fields) that must contain them.
        subsets: dict[str, tuple[Iterable[str], str, Collection[str]]] = {}
        subsets["fused"] = (self.fused, "column and split", columns)
        subsets["key_value"] = (self.key_value, "column, split and norms", (*columns, *self.norms))
        for kind in ("attention", "joined", "second_input", "by_head", "dropout"):
            subsets[kind] = (getattr(self, kind), "regions", self.regions)
        subsets["row of attention"] = (self.attention.values(), "row", self.row)
        subsets["row of dropout"] = ([dropout.row for dropout in self.dropout.values()], "row", self.row)
        subsets["layer of joined"] = (sum(self.joined.values(), ()), "column", self.column)
        subsets["divisors"] = (self.divisors, "divide", self.divide)
        return [
            *(
                f"{kind} {name!r} lies in none of the regions {list(self.regions)}: list its module as a "
                "region, or the gradient of its input would be incomplete"
                for kind in ("column", "split", "partial", "norms", "whole")
                for name in getattr(self, kind)
                if self.region_of(name) is None
            ),
            *(
                (
                    f"{kind} {name!r} lies in the region {self.region_of(name)!r}, whose activations are "
                    f"sharded: only layers outside of regions may be {kind}"
                )
                for kind in ("gathered", "scattered", "biases")
                for name in getattr(self, kind)
                if self.region_of(name) is not None
            ),
            *(
                (
                    f"region {name!r} is also in row, but a row-parallel layer ends a region: remove it from one "
                    "of them"
                )
                for name in self.regions
                if name in self.row
            ),
            *(
                f"{kind} {name!r} is not in {of} {list(allowed)}"
                for kind, (names, of, allowed) in subsets.items()
                for name in names
                if name not in allowed
            ),
            *(
                (
                    f"optional {path!r} is not the path of a module or parameter that the table names, nor a "
                    "parent of one"
                )
                for path in self.optional
                if not any(is_within(name, path) for name in (*self.modules, *self.split))
            ),
            *self._part_errors(),
        ]

    def _part_errors(self) -> list[str]:
        """List errors of the fields `stage` and `parts`; empty for a table without parts."""
        if isinstance(self.stage, StagePlan):
            return []
        errors = [
            f"stage names the part {stages.part!r}, but the parts are {list(self.parts)}"
            for stages in self.stage
            if stages.part not in self.parts
        ]
        errors += [
            f"{kind} names modules of layers, but this table has only parts: name them in a part's table"
            for kind in ("regions", "column", "row")
            if getattr(self, kind)
        ]
        return errors


_TABLES: dict[str, Table] = {}
_TABLES_OF_CLASSES: dict[str, Table] = {}


def register(table: Table, *model_types: str) -> None:
    """Register a table for these `config.model_type`s, replacing any earlier one."""
    for model_type in model_types:
        _TABLES[model_type] = table


def register_class(table: Table, *classes: str) -> None:
    """Register a table for models without a config, by class ("module.Name"); it applies to subclasses too."""
    for name in classes:
        _TABLES_OF_CLASSES[name] = table


def table_for_class(kind: type) -> Table | None:
    """Return the table of a model class or of its nearest base class, or None."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_TABLES_OF_CLASSES[name] for name in names if name in _TABLES_OF_CLASSES), None)


def table_for(model_type: str) -> Table | None:
    """Return the table of a model type, or None."""
    return _TABLES.get(model_type)


def model_types() -> list[str]:
    """Return the model types with a table, sorted."""
    return sorted(_TABLES)


def has_submodule(model: nn.Module, name: str) -> bool:
    """Return True if a module has a sub-module with this path."""
    module: object = model
    for child in filter(None, name.split(".")):
        module = getattr(module, child, None)
        if not isinstance(module, nn.Module):
            return False
    return True


def has_parameter(module: nn.Module, name: str) -> bool:
    """Return True if a module has a parameter with this path."""
    owner, _, last_name = name.rpartition(".")
    return has_submodule(module, owner) and last_name in module.get_submodule(owner)._parameters


def present_modules(root: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the names that are paths of sub-modules, in their order."""
    return [name for name in names if has_submodule(root, name)]


def active_regions(layer: nn.Module, table: Table) -> list[str]:
    """Return the regions that are used in a layer: a sharded module or parameter has it as its innermost region."""
    paths = {*dict(layer.named_modules()), *dict(layer.named_parameters())}
    sharded = (name for name in (*table.column, *table.row, *table.split) if name in paths)
    innermost = {table.region_of(name) for name in sharded}
    return [region for region in table.regions if region in innermost]


def layers_of(model: nn.Module, stacks: Iterable[str]) -> dict[str, nn.Module]:
    """Return all layers of these lists of layers, by path; a module that is not a list is one layer."""
    layers: dict[str, nn.Module] = {}
    for stack in stacks:
        module = model.get_submodule(stack)
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            layers |= {f"{stack}.{name}": layer for name, layer in module.named_children()}
        else:
            layers[stack] = module
    return layers


def full_sequence_paths(table: Table, layer: nn.Module) -> list[str]:
    """Return the modules of a layer that get full sequences under sequence parallelism on the tensor axis.

    Regions in them work as without it. These modules are the owners of experts, which take tokens without positions;
    modules that also use the unsharded input of a region; and sharded linear layers outside of regions.
    """
    owners = [name.rpartition(".")[0] for name in present_modules(layer, table.exits)]
    others = present_modules(layer, (*table.joined, *table.gathered, *table.scattered))
    return list(dict.fromkeys((*owners, *others)))


def is_any_within(path: str, prefixes: Iterable[str]) -> bool:
    """Return True if a path is one of these modules, or inside one."""
    return any(is_within(path, prefix) for prefix in prefixes)


def attribute(layer: Any, path: str) -> Any:
    """Return an attribute of a layer that a table names; raise ValueError if it is missing."""
    value = layer
    for name in path.split("."):
        if not hasattr(value, name):
            raise ValueError(
                f"the table names {path!r} in a layer, which has no attribute of this name: correct it"
            )
        value = getattr(value, name)
    return value


def has_attribute(layer: nn.Module, path: str) -> bool:
    """Return True if a layer has an attribute with this path."""
    owner, _, name = path.rpartition(".")
    return has_submodule(layer, owner) and hasattr(layer.get_submodule(owner), name)
