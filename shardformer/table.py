"""A model as a table of names: what is split how. table_policy.py turns it into a policy.

All paths but those of embeddings, heads and `stage` are seen from one layer. A name that matches nothing is an
error, unless the table says that it may.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..pipeline.plan import StagePlan, is_within
from .head_order import HeadOrder


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
class Table:
    """How the layers of one family of models are split.

    Args:
        stage: where the layers are, seen from the base model.
        regions: modules that take the replicated hidden states and work on split activations. One may be a layer of
            `column` itself.
        column: linear layers split by output features.
        row: linear layers split by input features; each ends a region.
        second_input: by region, the name of another replicated input besides the first (the states that cross
            attention attends to).
        optional: modules that some layers or models lack; they and all that is named below them are passed over
            there.
        by_head: by region, the names of other inputs that have an entry for each query head (position biases), each
            with the dimension of the heads, which may follow the samples in it; the ranks take those of their heads.
            An input that has one entry for all heads stays as it is. They have no gradient.
        fused: of `column`, what each one fuses: a number of projections of equal length, or the heads of query, key
            and value in an order. One that is cut between heads as it is needs no entry.
        key_value: of `column` and `split`, those with one block per key-value head.
        key_value_heads: path of the attribute with the number of key-value heads; None is the config's
            `num_key_value_heads`.
        groups: path of the attribute "query heads per key-value head"; None where no layer reads one.
        divide: paths of attributes that the layer's code reads as counts of what is held; divided by the ranks. An
            attribute of a config that a module holds is changed for this module alone.
        divide_key_value: the same for counts of key-value heads, of which each rank holds one at least.
        divisible: names in the config that must divide by the ranks.
        split: parameters inside a region that are split as they are, each with the dimension that is cut.
        native: names of classes among `column` and `row` that compute what a plain linear layer does.
        needed: settings of the config that a split needs, each with its value, since with another the layers compute
            otherwise than the table says.
        partial: replicated modules inside a region: their gradients are summed over the ranks.
        dropout: by region, dropout on its split activations.
        embedding: path of the vocabulary's embedding, seen from the base model.
        further_embeddings: more embeddings of the vocabulary, mostly tied to the first; passed over where a class
            lacks them.
        heads: paths of language-model heads, seen from the whole model; a class has at most one of them.

    Raises:
        ValueError: the names contradict one another; all contradictions at once.
    """

    stage: StagePlan
    regions: tuple[str, ...]
    column: tuple[str, ...]
    row: tuple[str, ...]
    second_input: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    by_head: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    fused: Mapping[str, int | HeadOrder] = field(default_factory=dict)
    key_value: tuple[str, ...] = ()
    key_value_heads: str | None = None
    groups: str | None = None
    divide: tuple[str, ...] = ()
    divide_key_value: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ("num_attention_heads",)
    split: Mapping[str, int] = field(default_factory=dict)
    native: tuple[str, ...] = ()
    needed: Mapping[str, object] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    dropout: Mapping[str, RegionDropout] = field(default_factory=dict)
    embedding: str
    further_embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise ValueError("\n".join(faults))

    def region_of(self, name: str) -> str | None:
        """The region that a path of the layer lies in, or None."""
        return next((region for region in self.regions if is_within(name, region)), None)

    @property
    def has_key_value_heads(self) -> bool:
        """Whether what is split knows key-value heads from query heads."""
        return bool(self.key_value) or any(isinstance(order, HeadOrder) for order in self.fused.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of a layer that the table names; for split parameters, the ones that hold them."""
        owners = (name.rpartition(".")[0] for name in self.split)
        return (*self.regions, *self.column, *self.row, *self.partial, *owners)

    def _faults(self) -> list[str]:
        inside = ((kind, name) for kind in ("column", "split", "partial") for name in getattr(self, kind))
        found = [
            f"{kind} {name!r} lies in none of the regions {list(self.regions)}: its input's gradient would be a part "
            "on each rank"
            for kind, name in inside
            if self.region_of(name) is None
        ]
        hooked = [region for region in self.regions if region not in self.column]
        subsets = {
            "fused": (self.fused, "column", self.column),
            "key_value": (self.key_value, "column or split", (*self.column, *self.split)),
            "second_input": (self.second_input, "regions", hooked),
            "by_head": (self.by_head, "regions", hooked),
            "dropout": (self.dropout, "regions", hooked),
            "row of dropout": ([dropout.row for dropout in self.dropout.values()], "row", self.row),
        }
        for kind, (names, of, allowed) in subsets.items():
            found += [
                f"{kind} {name!r} is not in {of} {list(allowed)}" for name in names if name not in allowed
            ]
        found += [
            f"optional {path!r} is no module that the table names, and none of those lies below it"
            for path in self.optional
            if not any(is_within(name, path) for name in self.modules)
        ]
        return found


_TABLES: dict[str, Table] = {}


def register(table: Table, *model_types: str) -> None:
    """Make a table the one for these `config.model_type`s; a later one takes an earlier one's place."""
    for model_type in model_types:
        _TABLES[model_type] = table


def table_for(model_type: str) -> Table | None:
    """The table of a model type, or None."""
    return _TABLES.get(model_type)


def model_types() -> list[str]:
    """The model types that have a table, sorted."""
    return sorted(_TABLES)
