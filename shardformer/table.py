"""A model as a table of names: what is split how. table_policy.py turns it into a policy.

All paths but those of embeddings, heads and `stage` are seen from one layer. A name that matches nothing is an
error, unless the table says that it may.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..pipeline.plan import StagePlan, is_within


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
        regions: modules that take the replicated hidden states and work on split activations. One that lies in
            another takes its place in the layers that have it (experts in an MLP).
        column: linear layers split by output features.
        row: linear layers split by input features; each ends a region.
        second_input: by region, the name of another replicated input besides the first (the states that cross
            attention attends to).
        optional: modules and split parameters that some layers or models lack; they and all that is named below
            them are passed over there.
        exits: modules other than linear layers whose outputs are a part on each rank (experts): they are summed,
            which ends a region as a row-split layer does.
        fused: of `column` and `split`, how many projections of equal length each one fuses.
        key_value: of `column` and `norms`, those with one output block per key-value head.
        groups: path of the attribute "query heads per key-value head"; None where no layer reads one.
        divide: paths of attributes that the layer's code reads as counts of what is held; divided by the ranks.
        divisible: names in the config that must divide by the ranks.
        split: parameters inside a region that are split as they are, each with the dimension that is cut.
        partial: replicated modules inside a region: their gradients are summed over the ranks.
        norms: root-mean-square norms inside a region, over all heads together: their mean of squares is taken over
            the ranks.
        dropout: by region, dropout on its split activations.
        gathered: linear layers outside of regions, split by output features, whose outputs are gathered again.
        scattered: linear layers outside of regions, split by input features, which arrive whole.
        embedding: path of the vocabulary's embedding, seen from the base model; None leaves it whole.
        further_embeddings: more embeddings of the vocabulary, mostly tied to the first; passed over where a class
            lacks them.
        heads: paths of language-model heads, seen from the whole model; a class has at most one of them.
        tensor_faults: why models of this table cannot be split over tensor ranks, whatever their sizes.
        pipeline_faults: why they cannot be cut into stages.

    Raises:
        ValueError: the names contradict one another; all contradictions at once.
    """

    stage: StagePlan
    regions: tuple[str, ...]
    column: tuple[str, ...]
    row: tuple[str, ...]
    second_input: Mapping[str, str] = field(default_factory=dict)
    exits: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    fused: Mapping[str, int] = field(default_factory=dict)
    key_value: tuple[str, ...] = ()
    groups: str | None = None
    divide: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ("num_attention_heads",)
    split: Mapping[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    dropout: Mapping[str, RegionDropout] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    embedding: str | None
    further_embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    tensor_faults: tuple[str, ...] = ()
    pipeline_faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise ValueError("\n".join(faults))

    def region_of(self, name: str) -> str | None:
        """The innermost region that a path of the layer lies in, or None."""
        return max((region for region in self.regions if is_within(name, region)), key=len, default=None)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of a layer that the table names; for split parameters, the ones that hold them."""
        owners = (name.rpartition(".")[0] for name in self.split)
        linear = (*self.column, *self.row, *self.gathered, *self.scattered)
        return (*self.regions, *linear, *self.exits, *self.partial, *self.norms, *owners)

    def _faults(self) -> list[str]:
        inside = (
            (kind, name) for kind in ("column", "split", "partial", "norms") for name in getattr(self, kind)
        )
        found = [
            f"{kind} {name!r} lies in none of the regions {list(self.regions)}: its input's gradient would be a part "
            "on each rank"
            for kind, name in inside
            if self.region_of(name) is None
        ]
        found += [
            f"{kind} {name!r} lies in the region {self.region_of(name)!r}, whose activations are split"
            for kind in ("gathered", "scattered")
            for name in getattr(self, kind)
            if self.region_of(name) is not None
        ]
        subsets = {
            "fused": (self.fused, "column and split", (*self.column, *self.split)),
            "key_value": (self.key_value, "column and norms", (*self.column, *self.norms)),
            "second_input": (self.second_input, "regions", self.regions),
            "dropout": (self.dropout, "regions", self.regions),
            "row of dropout": ([dropout.row for dropout in self.dropout.values()], "row", self.row),
        }
        for kind, (names, of, allowed) in subsets.items():
            found += [
                f"{kind} {name!r} is not in {of} {list(allowed)}" for name in names if name not in allowed
            ]
        found += [
            f"optional {path!r} is no module or parameter that the table names, and none of those lies below it"
            for path in self.optional
            if not any(is_within(name, path) for name in (*self.modules, *self.split))
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
