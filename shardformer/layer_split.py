"""Sharding of one layer by a table. table_policy.py shards the full model."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..cluster.errors import raise_errors
from ..cluster.forward_random import SplitRandom
from ..cluster.layout import divisors
from ..cluster.placement import PartialGrad, ReplicaKind, Replicated
from ..cluster.transformers_api import MASK_NAMES, Conv1D
from ..pipeline.stage_plan import is_within
from .layers.linear import (
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
    SharedKeyValueLinear1D_Col,
)
from .layers.lora import LoraSplit, adapted, base_layer_of, base_layer_path, is_lora
from .layers.norm import SplitRMSNorm
from .layers.region import (
    AttentionInputs,
    AttributeView,
    CommonInput,
    LocalCount,
    Region,
    RegionExit,
    SplitParameter,
)
from .layers.sequence_axis import INSTEAD, CommonRandom, ShardRandom, draws_random_numbers, sample_droppers
from .layers.split_gather import GatheredSequence, RegionSequence
from .policy import Errors, SubModuleReplacementDescription, join
from .tables.heads import Cut, HeadOrder, Heads
from .tables.table import (
    Table,
    active_regions,
    attribute,
    full_sequence_paths,
    has_attribute,
    has_parameter,
    has_submodule,
    is_any_within,
    present_modules,
)


class LayerSplit:
    """Replacements, attributes and placements by which a table shards one layer. It changes nothing itself.

    Args:
        table: names the modules and parameters, and how each is sharded.
        layer: the native layer.
        config: config of the model, or None.
        group: the tensor axis.
        sequence: sharding of sequences over this axis between regions; None leaves them unsharded.
        common_input: shared by the regions of all layers, for their second input; None for a single layer.
        path: path of the layer in the model; the replacements have paths from the model.
        errors: collects the errors of this layer; with None each is raised at once.
    """

    def __init__(
        self,
        table: Table,
        layer: nn.Module,
        config: Any,
        group: dist.ProcessGroup,
        *,
        sequence: RegionSequence | None = None,
        common_input: CommonInput | None = None,
        path: str = "",
        errors: Errors | None = None,
    ) -> None:
        self._table, self.layer, self._config, self._group = table, layer, config, group
        self._sequence, self._common_input = sequence, common_input or CommonInput()
        self._path, self._errors = path, errors

    def replacements(self) -> list[SubModuleReplacementDescription]:
        """Return the replacements and changes of the layer and its sub-modules, in order.

        Raises:
            ValueError: the table names a module that the layer lacks, or lacks a name that the layer needs.
        """
        raise_errors(self._adapter_errors() or [*self._missing_names(), *self._sequence_shard_errors()])
        randoms = self._split_randoms()
        in_regions = [*self._linear_layers(randoms), *self._exits_and_norms(), *self._regions(randoms)]
        return [*in_regions, *self._on_sequence_shards()]

    def split_parameters(self) -> list[SubModuleReplacementDescription]:
        """Return the changes of parameters that are sharded without replacing their module."""
        replacements = []
        for path, dim in (*self._table.split.items(), *self._table.biases.items()):
            if has_parameter(self.layer, path):
                with self._collect_errors():
                    length = self.layer.get_parameter(path).shape[dim]
                    owner, _, name = path.rpartition(".")
                    kwargs = {"name": name, "dim": dim, **self._cut_of(path, length)}
                    replacements.append(self._replacement(owner, SplitParameter, kwargs))
        return replacements

    def replicas(self) -> dict[str, ReplicaKind | None]:
        """Return how each parameter is replicated if no layer shards it, by path from the model.

        None is a parameter inside a region that the table declares in no way: if it stays unsharded, it is an error.
        """
        table, regions = self._table, active_regions(self.layer, self._table)
        all_token_paths = full_sequence_paths(table, self.layer)

        def kind(name: str) -> ReplicaKind | None:
            """Return how one parameter of the layer is replicated, by its path in the layer."""
            if is_any_within(name, table.partial):
                return PartialGrad
            if table.region_of(name) in regions and not is_any_within(name, table.whole):
                return None
            # Between regions a rank computes with its part of the sequences.
            sees_all_tokens = self._sequence is None or is_any_within(name, all_token_paths)
            return Replicated if sees_all_tokens else PartialGrad

        return {join(self._path, name): kind(name) for name, _ in self.layer.named_parameters()}

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that count local heads or features, by path from the model, with their new values.

        The config of a module is an attribute too: it is replaced by a view, so only this module sees the new values.
        """
        table, layer = self._table, self.layer
        values: dict[str, Any] = {}
        for path in table.divide:
            owner, _, name = path.rpartition(".")
            if has_submodule(layer, owner):
                with self._collect_errors():
                    total = attribute(layer, path)
                    local = self._local_count(path, total)
                    values[path] = LocalCount(local, total) if path in table.divisors else local
            elif has_attribute(layer, owner):  # of a config
                config = values.get(owner, attribute(layer, owner))
                values[owner] = AttributeView(
                    config, **{name: self._local_count(path, attribute(layer, path))}
                )
        # In some models, layers of other kinds have no key-value projections.
        has_key_value = not table.key_value or present_modules(layer, table.key_value)
        if table.groups is not None and has_key_value:
            values[table.groups] = self.heads.padded_group // self.heads.replicas
        for path in table.divide_key_value:
            if has_submodule(layer, path.rpartition(".")[0]):
                heads = self.heads
                total = attribute(layer, path) * heads.padded_key_value // heads.key_value
                values[path] = total * heads.replicas // heads.ranks
        return {join(self._path, path): value for path, value in values.items()}

    def _local_count(self, path: str, total: int) -> int:
        """Return a count divided by the ranks; a count in an attention region is first extended by the padded heads."""
        if self._table.region_of(path) in self._table.attention:
            total = total * self.heads.padded_query // self.heads.query
        require_divisible(path, total, self._group.size())
        return total // self._group.size()

    def _collect_errors(self, name: str = "") -> AbstractContextManager[None]:
        """Collect ValueError from the block as an error of the module at this path; raise it without a collector."""
        return nullcontext() if self._errors is None else self._errors.at(join(self._path, name))

    def _missing_names(self) -> list[str]:
        """List errors of names in the table that match nothing and are not optional."""
        table, layer = self._table, self.layer

        def lacks(path: str) -> bool:
            return not has_submodule(layer, path) and not has_parameter(layer, path)

        missing = [
            name
            for name in dict.fromkeys((*table.modules, *table.split, *table.biases))
            if lacks(name) and not any(is_within(name, path) and lacks(path) for path in table.optional)
        ]
        return [
            f"the table names {name!r} in a layer, which has no such module or parameter: correct the name, "
            "or list it as optional"
            for name in missing
            if not any(is_within(name, other) and other != name for other in missing)
        ]

    def _adapter_errors(self) -> list[str]:
        """List errors of peft modules that would be sharded, in a region or around its modules, and are not linear."""
        table, regions = self._table, active_regions(self.layer, self._table)
        linear = (*table.column, *table.row, *table.gathered, *table.scattered)

        def is_sharded(name: str) -> bool:
            return table.region_of(name) in regions or any(is_within(path, name) for path in table.modules)

        return [
            f"peft's {type(module).__qualname__} around {name} cannot be sharded: leave it out of "
            "target_modules, target_parameters and modules_to_save, or use tp_size=1"
            for name, module in adapted(self.layer)
            if name not in linear and not is_any_within(name, table.whole) and is_sharded(name)
        ]

    def _sequence_shard_errors(self) -> list[str]:
        """List reasons why the layer cannot compute on sequence shards between its regions."""
        if self._sequence is None:
            return []
        if "" in full_sequence_paths(self._table, self.layer):
            return [
                f"the layer itself contains experts, which take tokens without their positions: {INSTEAD}"
            ]
        dropouts = [
            dropout
            for _, module in adapted(self.layer)
            for dropout in getattr(module, "lora_dropout", {}).values()
        ]
        if any(getattr(dropout, "p", 0) > 0 for dropout in dropouts):
            return [
                "lora_dropout above 0 would drop different entries of an adapter's input on each rank: use "
                "lora_dropout=0, or a sequence_parallelism_mode on the sequence axis"
            ]
        return []

    def _linear_layers(self, randoms: dict[str, SplitRandom]) -> list[SubModuleReplacementDescription]:
        """Return the replacements of linear layers, followed by those of the LoRA adapters around them."""
        table, layer = self._table, self.layer
        randoms_of_rows = {
            table.dropout[region].row: split_random for region, split_random in randoms.items()
        }

        def column(name: str) -> dict[str, Any]:
            """Return the arguments of a column-parallel layer; its region reduces the gradient of the input."""
            _, outputs = widths(layer.get_submodule(name))
            self._require_fused_order(name, outputs)
            shared = self._shares_key_values(name)
            number = {"num_key_value_heads": self.heads.padded_key_value} if shared else {}
            return {
                "reduce_input_gradient": False,
                **number,
                **self._cut_of(name, outputs),
                **self._native_class(name),
            }

        def row(name: str) -> dict[str, Any]:
            """Return the arguments of a row-parallel layer, which ends its region."""
            inputs, _ = widths(layer.get_submodule(name))
            region_exit = {"split_random": randoms_of_rows.get(name), "sequence": self._sequence_of(name)}
            return {**region_exit, **self._cut_of(name, inputs), **self._native_class(name)}

        # Paths, classes in place of nn.Linear and of Conv1D, and the arguments for a path.
        kinds = (
            (table.column, (Linear1D_Col, GPT2FusedLinearConv1D_Col), column),
            (table.row, (Linear1D_Row, GPT2FusedLinearConv1D_Row), row),
            (table.gathered, (Linear1D_Col, GPT2FusedLinearConv1D_Col), lambda name: {"gather_output": True}),
            (table.scattered, (Linear1D_Row, GPT2FusedLinearConv1D_Row), lambda name: {"split_input": True}),
        )
        linear, adapters = list[SubModuleReplacementDescription](), list[SubModuleReplacementDescription]()
        for names, targets, kwargs in kinds:
            for name in present_modules(layer, names):
                with self._collect_errors(name):
                    module = layer.get_submodule(name)
                    of_linear, of_conv = targets
                    target: Any = of_conv if isinstance(base_layer_of(module), Conv1D) else of_linear
                    if self._shares_key_values(name):
                        target = SharedKeyValueLinear1D_Col
                    linear.append(self._replacement(base_layer_path(layer, name), target, kwargs(name)))
                    if is_lora(module):
                        random = randoms.get(table.region_of(name) or "")
                        adapters.append(self._replacement(name, LoraSplit, {"split_random": random}))
        return [*linear, *adapters]

    def _require_fused_order(self, name: str, outputs: int) -> None:
        """Raise ValueError for a projection that seems fused, if the table does not give the order of its features."""
        table, region = self._table, self._table.region_of(name)
        columns, rows = (
            [path for path in present_modules(self.layer, names) if table.region_of(path) == region]
            for names in (table.column, table.row)
        )
        if name in table.fused or len(columns) != 1 or len(rows) != 1:
            return
        inputs, _ = widths(self.layer.get_submodule(rows[0]))
        if outputs > inputs and outputs % inputs == 0:
            count = outputs // inputs
            raise ValueError(
                f"its {outputs} outputs are {count} times the {inputs} inputs of {rows[0]}, and fused does not say how "
                f"they are ordered: give fused={{{name!r}: {count}}} if they are {count} blocks (all queries, all "
                "keys, all values), or 1 if every head, or feature, has its own side by side"
            )

    def _shares_key_values(self, name: str) -> bool:
        """Return True for a fused query-key-value projection whose key-value heads are replicated over ranks."""
        return isinstance(self._table.fused.get(name), HeadOrder) and self.heads.replicas > 1

    def _exits_and_norms(self) -> list[SubModuleReplacementDescription]:
        """Return the replacements that mark the table's exits, and those of norms over sharded features."""
        table = self._table

        def norm(name: str) -> dict[str, Any]:
            return self._cut_of(name, self.layer.get_submodule(name).get_parameter("weight").shape[0])

        return [
            *self._replacing(table.exits, RegionExit),
            *self._replacing(table.norms, SplitRMSNorm, norm),
        ]

    def _regions(self, randoms: dict[str, SplitRandom]) -> list[SubModuleReplacementDescription]:
        """Return the entries of regions; a region that is a single linear layer needs that layer replaced before.

        A joined region has several modules that take its input, and each of them becomes an entry.
        """
        table = self._table
        joined = []
        for region in present_modules(self.layer, table.joined):
            first, *others = table.joined[region]
            # The first entry switches to the random state of the region.
            joined.append(self._replacement(first, Region, {"split_random": randoms.get(region)}))
            joined += [self._replacement(name, Region, {"split_random": None}) for name in others]

        def entry(region: str) -> dict[str, Any]:
            """Return the arguments of `Region` for a module whose inputs enter a region."""
            kwargs: dict[str, Any] = {
                "split_random": randoms.get(region),
                "sequence": self._sequence_of(region),
            }
            if (second := table.second_input.get(region)) is not None:
                self._require_input(region, second)
                kwargs |= {"second_input": second, "common_input": self._common_input}
            return kwargs | {"attention_inputs": self._attention_inputs(region)}

        single = (name for name in active_regions(self.layer, table) if name not in table.joined)
        masks_of_joined = self._replacing(
            [region for region in table.joined if region in table.attention],
            AttentionInputs,
            lambda region: {"attention_inputs": self._attention_inputs(region)},
        )
        return [*joined, *masks_of_joined, *self._replacing(single, Region, entry)]

    def _attention_inputs(self, region: str) -> AttentionInputs | None:
        """Return how masks, and other inputs of a region besides hidden states, enter it; None if it has none."""
        by_head = self._table.by_head.get(region, {})
        for name in by_head:
            self._require_input(region, name)
        if region not in self._table.attention and not by_head:
            return None
        # A mask made of sharded position biases has this rank's heads, and gradients of them alone.
        masks = () if self._table.biases or self._table.shared_biases else MASK_NAMES
        return AttentionInputs(
            group=self._group,
            by_head={**dict.fromkeys(masks, 1), **by_head},  # masks are (B, N, S, S)
            num_heads=self.heads.query,
            local_heads=self.heads.query_heads_of(self._group.rank()),
        )

    def _on_sequence_shards(self) -> list[SubModuleReplacementDescription]:
        """Return the changes of a layer whose sequences are sharded between its regions; empty if they are not.

        Modules that need all tokens gather them. With dropout, they draw equal numbers on all ranks, the layer others.
        """
        if self._sequence is None:
            return []
        full_paths = full_sequence_paths(self._table, self.layer)
        around = self._replacing(full_paths, GatheredSequence, lambda name: {"sequence": self._sequence})
        if not draws_random_numbers(self.layer):
            return around
        by_sample = [name for name in sample_droppers(self.layer) if not is_any_within(name, full_paths)]
        common = self._replacing((*full_paths, *by_sample), CommonRandom, lambda name: {"layer": self.layer})
        return [*around, *common, self._replacement("", ShardRandom, {})]

    def _sequence_of(self, name: str) -> RegionSequence | None:
        """Return the sequence sharding around a module of the layer; None if its sequences are unsharded."""
        return None if is_any_within(name, full_sequence_paths(self._table, self.layer)) else self._sequence

    def _require_input(self, region: str, name: str) -> None:
        """Raise ValueError if a region's forward lacks this input: its gradient would not be summed."""
        inputs = inspect.signature(self.layer.get_submodule(region).forward).parameters
        if name not in inputs:
            raise ValueError(
                f"the table names the input {name!r}, and the inputs are {list(inputs)}: name one of them"
            )

    def _replacing(
        self, names: Iterable[str], target: Any, kwargs: Callable[[str], dict[str, Any]] = lambda name: {}
    ) -> list[SubModuleReplacementDescription]:
        """Return a replacement by `target` for each of these paths that the layer has.

        `kwargs` returns the arguments of `target` for a path.
        """
        replacements = []
        for name in present_modules(self.layer, names):
            with self._collect_errors(name):
                replacements.append(self._replacement(name, target, kwargs(name)))
        return replacements

    def _replacement(self, name: str, target: Any, kwargs: dict[str, Any]) -> SubModuleReplacementDescription:
        return SubModuleReplacementDescription(
            suffix=join(self._path, name), target_module=target, kwargs=kwargs
        )

    def _native_class(self, name: str) -> dict[str, Any]:
        """Return as a layer argument the subclass of nn.Linear that the table lists as computing like it, or None."""
        kind = type(base_layer_of(self.layer.get_submodule(name)))
        is_native = kind.__name__ in self._table.native and issubclass(kind, nn.Linear)
        return {"native_class": kind if is_native else None}

    def _cut_of(self, name: str, length: int) -> dict[str, Any]:
        """Return how the sharded dimension, of this length, of a module or parameter is cut, as layer arguments.

        By key-value heads, by the order of a fused projection, by query heads, by equal fused blocks, or {}: evenly.
        """
        table, fused = self._table, self._table.fused.get(name, 1)
        is_by_head = table.region_of(name) in table.attention or name in table.attention.values()
        if name in table.key_value:
            return cut_arguments(self.heads.key_value_cut(length))
        if isinstance(fused, HeadOrder):
            return cut_arguments(self.heads.fused_cut(fused, length))
        if is_by_head or (table.attention and name in table.biases):
            return cut_arguments(self.heads.query_cut(length, num_blocks=fused))
        return {} if fused == 1 else {"split_sizes": (length // fused,) * fused}

    @property
    def heads(self) -> Heads:
        """The attention heads of the layer.

        Raises:
            ValueError: key-value heads can be neither distributed nor replicated evenly.
        """
        table = self._table
        heads = heads_of(self._config, self.layer, table, self._group.size())
        divides_evenly = heads.key_value % heads.ranks == 0 or heads.ranks % heads.key_value == 0
        # A table with `attention` pads uneven heads with heads of zeros.
        if not (table.attention or divides_evenly):
            name = (table.key_value_heads or "num_key_value_heads").rpartition(".")[2]
            count = heads.key_value
            sizes = [size for size in divisors(heads.query) if count % size == 0 or size % count == 0]
            raise ValueError(
                f"{name}={count} is neither a divisor nor a multiple of tp_size={heads.ranks}: use one of "
                f"tp_size={sizes}"
            )
        return heads

    def _split_randoms(self) -> dict[str, SplitRandom]:
        """Return a random state for each region with dropout of a probability above 0, by path of the region."""
        return {
            region: SplitRandom(self._group.rank())
            for region, dropout in self._table.dropout.items()
            if region in active_regions(self.layer, self._table) and dropout.is_used(self.layer)
        }


def cut_arguments(cut: Cut) -> dict[str, Any]:
    """Return a cut as arguments of parallel layers: `split_sizes`, `padded_sizes`, `stretches`, `replicas`."""
    sizes = {"split_sizes": cut.blocks, "padded_sizes": cut.padded, "stretches": cut.stretches}
    return sizes if cut.replicas == 1 else {**sizes, "replicas": cut.replicas}


def widths(projection: Any) -> tuple[int, int]:
    """Return the input and output features of an nn.Linear or transformers' Conv1D, perhaps inside LoRA."""
    projection = base_layer_of(projection)
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"this {type(projection).__name__} is not a plain linear layer of one weight: name a linear layer"
        )
    rows, columns = weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def heads_of(config: Any, layer: nn.Module, table: Table, ranks: int) -> Heads:
    """Return the attention heads of a layer that is not yet sharded, for a tensor axis of this many ranks.

    Their numbers are the layer's attributes that the table names, or else settings of the config.
    """

    def number(path: str | None, name: str, entry: str) -> int:
        """Return the attribute at a path in the layer; without one the config's setting. `entry` is for the error."""
        if path is not None:
            return int(attribute(layer, path))
        return int(setting(config, name, f"name the layer's own attribute in {entry}"))

    query = number(table.query_heads, "num_attention_heads", "query_heads")
    if not table.has_key_value_heads:
        return Heads(query=query, key_value=query, ranks=ranks)
    key_value = number(table.key_value_heads, "num_key_value_heads", "key_value_heads")
    return Heads(query=query, key_value=key_value, ranks=ranks)


def setting(config: Any, name: str, advice: str) -> Any:
    """Return a setting of a model's config; if it is missing, raise ValueError that ends with the advice."""
    value = getattr(config, name, None)
    if value is None:
        lack = "the model has none" if config is None else f"a {type(config).__name__} has no such setting"
        raise ValueError(f"the table takes {name} from the model's config, and {lack}: {advice}")
    return value


def require_divisible(name: str, count: int, ranks: int) -> None:
    """Raise ValueError unless the ranks divide a count."""
    if count % ranks:
        raise ValueError(
            f"{name}={count} is not divisible by tp_size={ranks}: use one of tp_size={divisors(count)}"
        )
