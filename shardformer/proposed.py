"""A table proposed from a traced forward of a small copy, for types that neither a table nor a plan describes.

[Note: proposed splits] Linear layers that take one input, and a later one that returns to its width, can be column- and
row-parallel, if what lies between them works on a slice of features, or of heads. The trace does not show whether it
does, in which order a fused projection has its features, or which attributes count heads. So variants are tried, of all
pairs of a layer together, then of each pair alone; split_trial.py accepts those whose numbers are right.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..cluster.transformers_api import Conv1D
from ..derive.build import Copy
from ..derive.module_calls import ModuleCall, calls_of
from ..derive.stages import sizes_of, stacks_of
from .derived import plain_table, region_dropout
from .layer_split import widths
from .tables.heads import HeadOrder
from .tables.table import Table, has_submodule

_GROUPS = "num_key_value_groups"
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")
_WIDTHS = (
    "all_head_size",
    "embed_dim",
    "inner_dim",
    "split_size",
    "hidden_size",
    "attn_dim",
    "d_inner",
    "dim",
)
# Attributes of a region that its code may read as local counts: none, of heads, or also of all heads' features.
_COUNTS: tuple[tuple[str, ...], ...] = (
    (),
    (*_HEADS, *_KEY_VALUE_COUNTS),
    (*_HEADS, *_KEY_VALUE_COUNTS, *_WIDTHS),
)


class _LinearCall(NamedTuple):
    """A recorded call of a linear layer.

    Args:
        path: its path in the layer of the model.
        x: the tensor that it was called with.
        inputs: number of input features.
        outputs: number of output features.
    """

    path: str
    x: Tensor
    inputs: int
    outputs: int


@dataclass(frozen=True)
class _LinearPair:
    """Column-parallel layers, the row-parallel layer that follows, and the region around them.

    Args:
        region: the path of the region; without a module around, that of the only column-parallel layer.
        columns: the column-parallel layers.
        row: the row-parallel layer.
        second_input: the name of the region's second input, if the column-parallel layers take two; otherwise "".
    """

    region: str
    columns: tuple[_LinearCall, ...]
    row: _LinearCall
    second_input: str

    @property
    def num_fused(self) -> int:
        """The number of projections fused in the column-parallel layer; 1 if there are several such layers."""
        return self.columns[0].outputs // self.row.inputs if len(self.columns) == 1 else 1


class _Variant(NamedTuple):
    """One way to shard a pair.

    Args:
        pair: the layers.
        order: order of the features of a fused projection, see `Table.fused`.
        counts: names of attributes of the region that are divided by the number of ranks.
    """

    pair: _LinearPair
    order: int | HeadOrder
    counts: tuple[str, ...]


def proposed_table(copy: Copy, model: nn.Module, departure: Callable[[Table], str | None]) -> Table:
    """Return a table for the largest list of layers of a model, with every pair of layers that can be split.

    Args:
        copy: a small copy of the model.
        model: the full model; may be on the meta device.
        departure: shards the copy by a table; returns how loss or gradients differ from one process, None if not.

    Raises:
        ValueError: no list of layers runs in order, or no split gives the numbers of one process; says how they differ.
    """
    calls = calls_of(copy)
    stack = next(iter(stacks_of(copy.model, calls, sizes_of(model))))
    # By the path of the row-parallel layer, which is mostly the same in all layers of the model.
    pairs: dict[str, _LinearPair] = {}
    for name, layer in copy.model.get_submodule(stack).named_children():
        for pair in _pairs(layer, _calls_within(calls, f"{stack}.{name}.")):
            pairs.setdefault(pair.row.path, pair)
    plain, layers = _table_without_layers(model, stack), list(model.get_submodule(stack).children())
    if departure(plain) is not None:
        plain = replace(plain, embedding=None, further_embeddings=(), heads=())
    if not (pairs or plain.embedding or plain.heads):
        raise ValueError(f"the layers {stack}: no linear layers widen and return to their width")

    def first_exact(candidates: Iterable[Sequence[_Variant]]) -> tuple[Sequence[_Variant], str | None]:
        """Return the first combination with the numbers of one process; or (), and how the last one differed."""
        error: str | None = None
        for variants in candidates:
            try:
                error = departure(_table(plain, variants, layers))
            except ValueError as contradiction:  # between pairs, as of a row that is the region of another
                error = str(contradiction)
            if error is None:
                return variants, None
        return (), error

    variants, error = first_exact(_combinations([*pairs.values()]))
    if error is not None and len(pairs) > 1:  # try each pair alone, then together those that can be split
        exact_alone = [
            variant for pair in pairs.values() for variant in first_exact(_combinations([pair]))[0]
        ]
        if exact_alone:
            variants, error = first_exact([exact_alone])
    if error is not None:
        raise ValueError(f"the layers {stack}: {error}")
    return _table(plain, variants, layers)


def _table_without_layers(model: Any, stack: str) -> Table:
    """Return the table of embedding and head, with the names of the config's numbers of heads in `divisible`."""
    counts = ("num_attention_heads", "num_key_value_heads")
    divisible = tuple(name for name in counts if isinstance(getattr(model.config, name, None), int))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return replace(plain_table(model, stack.removeprefix(prefix)), divisible=divisible)


def _calls_within(calls: Sequence[ModuleCall], prefix: str) -> list[ModuleCall]:
    """Return the calls of a layer's modules, with paths from the layer."""
    return [
        call._replace(path=call.path.removeprefix(prefix)) for call in calls if call.path.startswith(prefix)
    ]


def _pairs(layer: nn.Module, calls: Sequence[ModuleCall]) -> Iterator[_LinearPair]:
    """Yield the pairs of a layer: successive linear layers with one input, then one that returns to its width.

    In cross attention the first layers have two inputs, of queries and of keys. So a layer with another input counts
    among them, too, if a module around all of them takes both inputs.
    """
    columns: list[_LinearCall] = []
    for call in calls:
        module: Any = layer.get_submodule(call.path)
        if type(module) not in (nn.Linear, Conv1D) or not call.inputs:
            continue
        linear = _LinearCall(call.path, call.inputs[0], *widths(module))
        if columns and (_is_same(linear.x, columns[0].x) or _module_around(calls, [*columns, linear])):
            columns.append(linear)
        elif (
            columns
            and linear.outputs in {column.inputs for column in columns}
            and columns[0].outputs % linear.inputs == 0
        ):
            region = _module_around(calls, columns)
            path, second_input = columns[0].path, ""
            if region is not None:
                path, second_input = region.path, _second_input(region, columns)
            yield _LinearPair(path, tuple(columns), linear, second_input)
            columns = []
        else:
            columns = [linear]


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return True if both are the same tensor or views of all its elements."""
    return tensor.data_ptr() == other.data_ptr() and tensor.numel() == other.numel()


def _module_around(calls: Sequence[ModuleCall], columns: Sequence[_LinearCall]) -> ModuleCall | None:
    """Return the call of the innermost module around linear layers that takes all their inputs; None without one."""
    paths = [linear.path for linear in columns]
    parents = {*accumulate(paths[0].split(".")[:-1], lambda path, name: f"{path}.{name}")}
    around = [
        call
        for call in calls
        if call.path in parents
        and all(path.startswith(f"{call.path}.") for path in paths)
        and all(any(_is_same(x, linear.x) for x in call.inputs) for linear in columns)
    ]
    return max(around, key=lambda call: len(call.path), default=None)


def _second_input(region: ModuleCall, columns: Sequence[_LinearCall]) -> str:
    """Return the name of the second of a region's arguments that the linear layers take; "" if they take one alone."""
    names = [name for name, x in region.named.items() if any(_is_same(x, linear.x) for linear in columns)]
    distinct = [name for name in names if not _is_same(region.named[name], region.named[names[0]])]
    return distinct[0] if distinct else ""


def _combinations(pairs: Sequence[_LinearPair]) -> Iterator[list[_Variant]]:
    """Yield candidates, each one variant of every pair: all pairs have the same order and the same counts.

    The order of fused projections, as `Table.fused` has it, is first one block for each projection (None here), then
    all projections of a head side by side.
    """
    is_fused = any(pair.num_fused > 1 for pair in pairs)
    orders: tuple[int | HeadOrder | None, ...] = (None, 1, HeadOrder.BY_KIND) if is_fused else (None,)
    for order, counts in product(orders, _COUNTS):
        yield [_Variant(pair, pair.num_fused if order is None else order, counts) for pair in pairs]


def _table(plain: Table, variants: Sequence[_Variant], layers: Sequence[nn.Module]) -> Table:
    """Return the table without layers, extended by the pairs of these variants and the regions around them.

    Other parameters in a region are declared too: those of the region itself are sharded, with a value for each head;
    those of modules in it are replicated with partial gradients.

    Args:
        plain: the table without layers.
        variants: one for each pair.
        layers: the layers of the full model, for the attributes and parameters of the regions.
    """
    pairs = [variant.pair for variant in variants]
    columns = [linear.path for pair in pairs for linear in pair.columns]
    rows = [pair.row.path for pair in pairs]
    regions = {pair.region: _first_with(layers, pair.region) for pair in pairs}
    key_value = [name for pair in pairs for name in _narrow_key_values(pair, layers)]
    groups = [f"{region}.{_GROUPS}" for region, module in regions.items() if hasattr(module, _GROUPS)]
    counted = [
        (variant.pair.region, name)
        for variant in variants
        for name in variant.counts
        if _is_count_attribute(regions[variant.pair.region], name)
    ]
    partial, split = list[str](), dict[str, int]()
    for region, module in regions.items():
        for name, _ in module.named_parameters():
            owner, _, _ = (path := f"{region}.{name}").rpartition(".")
            if owner == region and region not in columns:
                split[path] = 0
            elif owner not in (*columns, *rows):
                partial.append(owner)
    return replace(
        plain,
        regions=tuple(regions),
        second_input={pair.region: pair.second_input for pair in pairs if pair.second_input},
        column=tuple(columns),
        row=tuple(rows),
        key_value=tuple(key_value),
        divisible=plain.divisible[: _num_head_counts(pairs, key_value)],
        groups=groups[0] if groups and key_value else None,
        fused={
            variant.pair.columns[0].path: variant.order for variant in variants if variant.pair.num_fused > 1
        },
        divide=tuple(f"{region}.{name}" for region, name in counted if name not in _KEY_VALUE_COUNTS),
        divide_key_value=tuple(f"{region}.{name}" for region, name in counted if name in _KEY_VALUE_COUNTS),
        partial=tuple(dict.fromkeys(partial)),
        split=split,
        optional=tuple(dict.fromkeys((*regions, *columns, *rows, *partial, *split))),
        dropout={
            pair.region: dropout
            for pair in pairs
            if (dropout := region_dropout(pair.region, regions[pair.region], pair.row.path))
        },
    )


def _num_head_counts(pairs: Sequence[_LinearPair], key_value: Sequence[str]) -> int:
    """Return how many of `divisible` the ranks must divide: 1, the query heads; 2, key-value heads too; or 0."""
    has_heads = any(pair.num_fused > 1 or len(pair.columns) == 3 for pair in pairs)
    return (1 if key_value else 2) if has_heads else 0


def _first_with(layers: Sequence[nn.Module], path: str) -> nn.Module:
    """Return the module at a path in the first layer that has one."""
    return next(layer for layer in layers if has_submodule(layer, path)).get_submodule(path)


def _narrow_key_values(pair: _LinearPair, layers: Sequence[nn.Module]) -> list[str]:
    """Return the key and value projections of a pair with three columns if they have fewer heads than the query."""
    if len(pair.columns) != 3:
        return []
    query, *others = (widths(_first_with(layers, linear.path))[1] for linear in pair.columns)
    return [linear.path for linear, width in zip(pair.columns[1:], others, strict=True) if width < query]


def _is_count_attribute(module: nn.Module, name: str) -> bool:
    """Return True if a module has an integer attribute above 1 of this name."""
    value = vars(module).get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
