"""A model as a table of names: how each part is split. table_policy.py turns it into a policy.

All paths but those of embeddings, heads and `stage` are seen from one layer. A name that matches nothing is an
error, unless the table says that it may.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...cluster.errors import raise_errors
from ...pipeline.plan import StagePlan, is_within
from .heads import HeadOrder


@dataclass(frozen=True, kw_only=True)
class RegionDropout:
    """Dropout on split activations, which must differ from rank to rank.

    Args:
        probability: path of the attribute with its probability.
        row: the row-split layer that ends the region.
    """

    probability: str
    row: str


@dataclass(frozen=True, kw_only=True)
class PartStages:
    """A pipeline over the layers of one of the models that a model is made of.

    Args:
        part: its path.
        entry, leading, everywhere: what runs before its layers, see `StagePlan`, seen from the whole model.
        optional: of `leading`, those that some models lack.
    """

    part: str
    entry: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Names of the modules and parameters of one family of models, by how they are split.

    Args:
        stage: where the layers are, seen from the base model: lists of them, or a module that is one layer. For a
            model made of several ones, the parts whose layers a pipeline may cut; the first that a class has is it.
        parts: models inside the model by their paths, seen from the base model, each with a `config` of its own and
            split by a table of its own; None is the one of its model type. Passed over where a class lacks them.
        regions: modules that take the replicated hidden states and work on split activations. One may be a layer of
            `column` itself. One that lies in another takes its place in the layers that have it (experts in an MLP).
        column: linear layers split by output features.
        row: linear layers split by input features; each ends a region.
        attention: regions whose split activations are heads, each with the row-split layer that ends it. Where the
            ranks do not divide their number, heads of zeros are added, also to what is split or a bias and has
            entries for them. In other tables the ranks must divide it.
        query_heads: path of the attribute with the number of query heads, of whatever part of a layer; None is the
            config's `num_attention_heads`.
        joined: by region whose module also uses its input whole (ALBERT's attention adds it to its output), the
            column-split layers that take the input, in the order in which they run; each is an entry of the region.
        whole: modules inside a region that work on replicated activations, behind its end.
        second_input: by region, the name of another replicated input besides the first (the states that cross
            attention attends to).
        optional: modules and split parameters that some layers or models lack; they and all that is named below
            them are passed over there.
        exits: modules other than linear layers whose outputs are a part on each rank (experts): they are summed,
            which ends a region as a row-split layer does.
        by_head: by region, the names of other inputs that have an entry for each query head (position biases), each
            with the dimension of the heads, which may follow the samples in it; the ranks take those of their heads.
            An input that has one entry for all heads stays as it is, and so does one of two dimensions (flash-attn's
            masks of padding). They have no gradient.
        fused: of `column` and `split`, what each one fuses: a number of projections of equal length, or (of `column`)
            the heads of query, key and value in an order. One that is cut between heads as it is needs no entry.
        key_value: of `column`, `split` and `norms`, those with one block per key-value head.
        key_value_heads: path of the attribute with the number of key-value heads; None is the config's
            `num_key_value_heads`.
        groups: path of the attribute "query heads per key-value head"; None where no layer reads one.
        divide: paths of attributes that the layer's code reads as local counts; divided by the ranks. An
            attribute of a config that a module holds is changed for this module alone.
        divide_key_value: the same for counts of key-value heads, of which each rank holds one at least.
        divisors: of `divide`, those by which the layer's code divides whole widths too.
        divisible: names in the config of numbers that must divide by the ranks, where `attention` says nothing.
        split: parameters inside a region that are split as they are, each with the dimension that is cut.
        biases: parameters beside the regions, which are given a value per head of them (position biases), each with
            the dimension that is cut.
        shared_biases: the same beside the layers, seen from the base model, where a model has them.
        native: names of classes among `column` and `row` that compute what a plain linear layer does.
        needed: settings of the config that a split needs, each with its value, since with another the layers compute
            otherwise than the table says.
        partial: replicated modules or single parameters inside a region: their gradients are summed over the ranks.
        norms: root-mean-square norms inside a region, over all heads together: their mean of squares is taken over
            the ranks.
        dropout: by region, dropout on its split activations.
        gathered: linear layers outside of regions, split by output features, whose outputs are gathered again.
        scattered: linear layers outside of regions, split by input features, which arrive whole.
        embedding: path of the vocabulary's embedding, seen from the base model; None leaves it whole.
        further_embeddings: more embeddings of the vocabulary, mostly tied to the first; passed over where a class
            lacks them.
        heads: paths of language-model heads, seen from the whole model; a class has at most one of them.
        older: tables in place of this one for models of older releases of transformers, each by the path (seen from
            the base model) of a module that only those have.
        tensor_errors: why models of this table cannot be split over tensor ranks, whatever their sizes.
        pipeline_errors: why they cannot be cut into stages.

    Raises:
        ValueError: the names contradict one another; all contradictions at once.
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
        """The innermost region that a path of the layer lies in, or None."""
        return max((region for region in self.regions if is_within(name, region)), key=len, default=None)

    @property
    def has_key_value_heads(self) -> bool:
        """True where key-value heads differ from query heads in what is split."""
        return bool(self.key_value) or any(isinstance(order, HeadOrder) for order in self.fused.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of a layer that the table names; for split parameters, the ones that hold them. Each once."""
        owners = (name.rpartition(".")[0] for name in (*self.split, *self.biases))
        linear = (*self.column, *self.row, *self.gathered, *self.scattered)
        inside = (*self.exits, *self.partial, *self.norms, *self.whole)
        return tuple(dict.fromkeys((*self.regions, *linear, *inside, *owners)))

    def _errors(self) -> list[str]:
        """Names in the wrong place, without their counterpart, or that stand for nothing."""
        columns, subsets = (
            (*self.column, *self.split),
            dict[str, tuple[Iterable[str], str, Collection[str]]](),
        )
        subsets["fused"] = (self.fused, "column and split", columns)
        subsets["key_value"] = (self.key_value, "column, split and norms", (*columns, *self.norms))
        for kind in ("attention", "joined", "second_input", "by_head", "dropout"):
            subsets[kind] = (getattr(self, kind), "regions", self.regions)
        subsets["row of attention"] = (self.attention.values(), "row", self.row)
        subsets["row of dropout"] = ([each.row for each in self.dropout.values()], "row", self.row)
        subsets["layer of joined"] = (sum(self.joined.values(), ()), "column", self.column)
        subsets["divisors"] = (self.divisors, "divide", self.divide)
        return [
            *(
                f"{kind} {name!r} lies in none of the regions {list(self.regions)}: its input's gradient would be a "
                "part on each rank"
                for kind in ("column", "split", "partial", "norms", "whole")
                for name in getattr(self, kind)
                if self.region_of(name) is None
            ),
            *(
                f"{kind} {name!r} lies in the region {self.region_of(name)!r}, whose activations are split"
                for kind in ("gathered", "scattered", "biases")
                for name in getattr(self, kind)
                if self.region_of(name) is not None
            ),
            *(
                f"region {name!r} is in row: such a layer ends a region, and its input is split already"
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
                f"optional {path!r} is no module or parameter that the table names, and none of those lies below it"
                for path in self.optional
                if not any(is_within(name, path) for name in (*self.modules, *self.split))
            ),
            *self._part_errors(),
        ]

    def _part_errors(self) -> list[str]:
        """Errors of a table of parts."""
        if isinstance(self.stage, StagePlan):
            return []
        found = [
            f"stage names the part {stages.part!r}, and the parts are {list(self.parts)}"
            for stages in self.stage
            if stages.part not in self.parts
        ]
        found += [
            f"{kind} names modules of layers, and a table of parts has none of its own: name them in a part's"
            for kind in ("regions", "column", "row")
            if getattr(self, kind)
        ]
        return found


_TABLES: dict[str, Table] = {}
_TABLES_OF_CLASSES: dict[str, Table] = {}


def register(table: Table, *model_types: str) -> None:
    """Make a table the one for these `config.model_type`s; a later one takes an earlier one's place."""
    for model_type in model_types:
        _TABLES[model_type] = table


def register_class(table: Table, *classes: str) -> None:
    """Make a table the one for models without a config of these classes ("module.Name") and classes made from them."""
    for name in classes:
        _TABLES_OF_CLASSES[name] = table


def table_for_class(kind: type) -> Table | None:
    """The table of a class of models, or of the nearest class that it was made from, or None."""
    names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    return next((_TABLES_OF_CLASSES[name] for name in names if name in _TABLES_OF_CLASSES), None)


def table_for(model_type: str) -> Table | None:
    """The table of a model type, or None."""
    return _TABLES.get(model_type)


def model_types() -> list[str]:
    """The model types that have a table, sorted."""
    return sorted(_TABLES)


def has_submodule(model: nn.Module, name: str) -> bool:
    """Return True where a module has a sub-module of this path."""
    module: object = model
    for each in filter(None, name.split(".")):
        module = getattr(module, each, None)
        if not isinstance(module, nn.Module):
            return False
    return True


def has_parameter(module: nn.Module, name: str) -> bool:
    """Return True where a module has a parameter of this path."""
    owner, _, own_name = name.rpartition(".")
    return has_submodule(module, owner) and own_name in module.get_submodule(owner)._parameters


def present(root: nn.Module, names: Iterable[str]) -> list[str]:
    """List the names that are sub-modules, in their order."""
    return [name for name in names if has_submodule(root, name)]


def active_regions(layer: nn.Module, table: Table) -> list[str]:
    """The regions that a layer has: something of what it holds is split, and lies in no region further in."""
    parts = {*dict(layer.named_modules()), *dict(layer.named_parameters())}
    named = (name for name in (*table.column, *table.row, *table.split) if name in parts)
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


def whole_paths(table: Table, layer: nn.Module) -> list[str]:
    """The modules that are given whole sequences, with the regions in them as without sequence parallelism.

    Those that hold experts, which are given tokens without their places; those that use what enters a region whole
    besides; and linear layers outside of regions that are split.
    """
    holders = [name.rpartition(".")[0] for name in present(layer, table.exits)]
    others = present(layer, (*table.joined, *table.gathered, *table.scattered))
    return list(dict.fromkeys((*holders, *others)))


def is_any_within(path: str, prefixes: Iterable[str]) -> bool:
    """Return True where a path lies in, or is, one of these modules."""
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


def attribute(layer: Any, path: str) -> Any:
    """An attribute of a layer that a table names."""
    found = layer
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(
                f"the table names {path!r} in a layer, which has no attribute of this name: correct it"
            )
        found = getattr(found, name)
    return found


def has_attribute(layer: nn.Module, path: str) -> bool:
    """Return True where a layer has an attribute of this path."""
    owner, _, name = path.rpartition(".")
    return has_submodule(layer, owner) and hasattr(layer.get_submodule(owner), name)
