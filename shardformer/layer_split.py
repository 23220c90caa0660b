"""The split of one layer by a table, and what a layer has of what a table names. The whole model is table_policy.py."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..cluster.mesh import divisors
from ..cluster.random import SplitRandom
from ..pipeline.plan import is_within
from .layers.linear import (
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
    SharedKeyValueLinear1D_Col,
)
from .layers.lora import LoraSplit, adapted, is_lora, plain, plain_path
from .layers.norm import SplitRMSNorm
from .layers.region import (
    AttributeView,
    CommonInput,
    LocalCount,
    PartialGradient,
    Region,
    RegionExit,
    SplitParameter,
)
from .layers.sequence_axis import CommonRandom, PartRandom, draws, samplewise
from .layers.split_gather import RegionSequence, WholeSequence
from .policy import Errors, SubModuleReplacementDescription, join
from .tables.heads import Cut, HeadOrder, Heads
from .tables.table import (
    Table,
    active_regions,
    attribute,
    has_attribute,
    has_parameter,
    has_submodule,
    is_any_within,
    parameters_of_parts,
    present,
    whole_paths,
)

Replacement = SubModuleReplacementDescription


class LayerSplit:
    """Split of one layer.

    Args:
        table: what is split how.
        layer: the native one.
        config: of the model, where it has one.
        group: the tensor axis.
        sequence: the sharding of sequences over that between regions; None leaves them whole.
        common_input: of the regions of all layers, for the second input of some; None for a layer on its own.
        path: of the layer in the model.
        errors: of the model, to which those of this layer are added; None raises each where it is found.
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

    def replacements(self) -> list[Replacement]:
        """Replacements and changes of its sub-modules, in this order; the path "" is the layer.

        Raises:
            ValueError: the layer lacks what the table names, or holds what it should name and does not.
        """
        if found := self._adapter_errors() or [*self._missing(), *self._unnamed()]:
            raise ValueError("\n".join(found))
        randoms = self._split_randoms()
        return [*self._linear_layers(randoms), *self._marks(), *self._regions(randoms), *self._parts()]

    def split_parameters(self) -> list[Replacement]:
        """The parameters that are split as they are."""
        table = self._table
        found = []
        for path, dim in (*table.split.items(), *table.biases.items()):
            with self._at():
                found += split_parameter(
                    self.layer,
                    path,
                    dim,
                    copies=self._copies(path),
                    num_blocks=table.fused.get(path, 1),
                    cut=self._cut_of(path),
                )
        return found

    def attributes(self) -> dict[str, Any]:
        """New values of its attributes by path; a module's config is one, changed for this module alone."""
        table, layer = self._table, self.layer
        values: dict[str, Any] = {}
        own = _present_attributes(layer, table.divide)
        for path in own:
            with self._at():
                whole = attribute(layer, path)
                local = self._local_count(path, whole)
                values[path] = LocalCount(local, whole) if path in table.divisors else local
        attends = not table.key_value or present(layer, table.key_value)  # some layers attend otherwise
        if table.groups is not None and attends:
            heads = self.heads
            values[table.groups] = heads.padded_group // heads.copies
        for path in _present_attributes(layer, table.divide_key_value):
            heads = self.heads
            whole = attribute(layer, path) * heads.padded_key_value // heads.key_value
            values[path] = whole * heads.copies // heads.ranks
        for path in table.divide:
            config, _, name = path.rpartition(".")
            if path not in own and has_attribute(layer, config):
                known = values.get(config, attribute(layer, config))
                values[config] = AttributeView(
                    known, **{name: self._local_count(path, attribute(layer, path))}
                )
        return values

    def _local_count(self, path: str, whole: int) -> int:
        """Local count of so many, with the padded heads where they are counts of heads."""
        if self._table.region_of(path) in self._table.attention:
            whole = whole * self.heads.padded_query // self.heads.query
        require_divisible(path, whole, self._group.size())
        return whole // self._group.size()

    def _at(self, name: str = "") -> AbstractContextManager[None]:
        """Collect errors of a module of the layer, where errors are collected."""
        return nullcontext() if self._errors is None else self._errors.at(join(self._path, name))

    def _missing(self) -> list[str]:
        """Names of the table that match nothing, and that nothing optional explains."""
        table, layer = self._table, self.layer

        def lacks(path: str) -> bool:
            return not has_submodule(layer, path) and not has_parameter(layer, path)

        names = dict.fromkeys((*table.modules, *table.split, *table.biases))
        missing = [
            name
            for name in names
            if lacks(name) and not any(is_within(name, path) and lacks(path) for path in table.optional)
        ]
        return [
            f"the table names {name!r} in a layer, which has no such module or parameter: correct the name, or call it "
            "optional"
            for name in missing
            if not any(is_within(name, other) and other != name for other in missing)
        ]

    def _unnamed(self) -> list[str]:
        """Whole parameters among split activations, whose gradients nobody would sum over the ranks."""
        table, regions = self._table, active_regions(self.layer, self._table)
        known = (*table.column, *table.row, *table.split, *table.partial, *table.whole, *table.norms)
        return [
            f"{name} works on split activations in the region {table.region_of(name)!r}, and the table does not name "
            "it: name its module in column, row, norms or partial"
            for name, _ in self.layer.named_parameters()
            if table.region_of(name) in regions and not any(is_within(name, each) for each in known)
        ]

    def _adapter_errors(self) -> list[str]:
        """Modules of peft around what is split otherwise than by linear layers."""
        table = self._table
        regions = active_regions(self.layer, table)
        linear = (*table.column, *table.row, *table.gathered, *table.scattered)
        return [
            f"peft's {type(module).__qualname__} around {name} is not split with it: leave it out of target_modules, "
            "target_parameters and modules_to_save, or use tp_size=1"
            for name, module in adapted(self.layer)
            if name not in linear
            and not any(is_within(name, each) for each in table.whole)
            and (table.region_of(name) in regions or any(is_within(each, name) for each in table.modules))
        ]

    def _linear_layers(self, randoms: dict[str, SplitRandom]) -> list[Replacement]:
        table = self._table
        at_row = {table.dropout[region].row: split_random for region, split_random in randoms.items()}
        column = self._put(
            table.column, self._column_type, lambda name: {**self._column_kwargs(name), **self._native(name)}
        )
        row = self._put(
            table.row,
            self._row_type,
            lambda name: {
                "split_random": at_row.get(name),
                "sequence": self._sequence_of(name),
                **self._row_kwargs(name),
                **self._native(name),
            },
        )
        gathered = self._put(table.gathered, self._column_type, lambda name: {"gather_output": True})
        scattered = self._put(table.scattered, self._row_type, lambda name: {"split_input": True})
        linear = [*column, *row, *gathered, *scattered]
        adapters = self._put(
            (each.suffix for each in linear if is_lora(self.layer.get_submodule(each.suffix))),
            lambda name: LoraSplit,
            lambda name: {"split_random": randoms.get(table.region_of(name) or "")},
        )
        inside = [replace(each, suffix=plain_path(self.layer, each.suffix)) for each in linear]
        return [*inside, *adapters]

    def _marks(self) -> list[Replacement]:
        """Marks on exits, partial gradients, and norms over all heads."""
        table = self._table
        return [
            *self._put(table.exits, lambda name: RegionExit),
            *self._put(table.partial, lambda name: PartialGradient),
            *(
                Replacement(suffix=owner, target_module=PartialGradient, kwargs={"name": name})
                for path in table.partial
                if has_parameter(self.layer, path)
                for owner, _, name in [path.rpartition(".")]
            ),
            *self._put(table.norms, lambda name: SplitRMSNorm, self._norm_kwargs),
        ]

    def _regions(self, randoms: dict[str, SplitRandom]) -> list[Replacement]:
        """Entries, after the layers themselves: a region may be a single layer, or begin at several."""
        table = self._table
        regions = [name for name in active_regions(self.layer, table) if name not in table.joined]
        joined = [
            Replacement(suffix=name, target_module=Region, kwargs={"split_random": switch})
            for region in present(self.layer, table.joined)
            for name, switch in zip_longest(table.joined[region], [randoms.get(region)])
        ]
        single = self._put(
            regions,
            lambda name: Region,
            lambda name: {
                "split_random": randoms.get(name),
                **self._second_input(name),
                "sequence": self._sequence_of(name),
                **self._by_head(name),
            },
        )
        return [*joined, *single]

    def _second_input(self, region: str) -> dict[str, Any]:
        name = self._table.second_input.get(region)
        if name is not None:
            self._require_input(region, name)
        return {} if name is None else {"second_input": name, "common_input": self._common_input}

    def _parts(self) -> list[Replacement]:
        """Changes of modules that compute on parts of sequences, and of those among them that do not."""
        if self._sequence is None:
            return []
        wholes = whole_paths(self._table, self.layer)
        partial = [
            Replacement(suffix=owner, target_module=PartialGradient, kwargs={"name": name})
            for path in parameters_of_parts(self._table, self.layer)
            for owner, _, name in [path.rpartition(".")]
        ]
        around = self._put(wholes, lambda name: WholeSequence, lambda name: {"sequence": self._sequence})
        if not draws(self.layer):
            return [*partial, *around]
        by_sample = [name for name in samplewise(self.layer) if not is_any_within(name, wholes)]
        common = self._put(
            (*wholes, *by_sample), lambda name: CommonRandom, lambda name: {"layer": self.layer}
        )
        return [*partial, *around, *common, Replacement(suffix="", target_module=PartRandom)]

    def _sequence_of(self, name: str) -> RegionSequence | None:
        """Sequence sharding around a module of the layer; None where its sequences are whole."""
        is_whole = is_any_within(name, whole_paths(self._table, self.layer))
        return None if is_whole else self._sequence

    def _require_input(self, region: str, name: str) -> None:
        """Raise ValueError where a region's forward does not take this input, whose gradient nobody would sum."""
        inputs = inspect.signature(self.layer.get_submodule(region).forward).parameters
        if name not in inputs:
            raise ValueError(
                f"the table names the input {name!r}, and the inputs are {list(inputs)}: name one of them"
            )

    def _put(self, names: Iterable[str], target: Any, kwargs: Any = lambda name: {}) -> list[Replacement]:
        """Replacements of those sub-modules that the layer has; target and arguments by name."""
        found = []
        for name in present(self.layer, names):
            with self._at(name):
                found.append(Replacement(suffix=name, target_module=target(name), kwargs=kwargs(name)))
        return found

    def _column_type(self, name: str) -> Any:
        if isinstance(self._table.fused.get(name), HeadOrder) and self.heads.copies > 1:
            return SharedKeyValueLinear1D_Col
        return GPT2FusedLinearConv1D_Col if self._is_conv1d(name) else Linear1D_Col

    def _row_type(self, name: str) -> Any:
        return GPT2FusedLinearConv1D_Row if self._is_conv1d(name) else Linear1D_Row

    def _is_conv1d(self, name: str) -> bool:
        return isinstance(plain(self.layer.get_submodule(name)), Conv1D)

    def _native(self, name: str) -> dict[str, Any]:
        """The layer's class, inside of LoRA, where the table says that it computes as a plain linear layer does."""
        kind = type(plain(self.layer.get_submodule(name)))
        is_native = kind.__name__ in self._table.native and issubclass(kind, nn.Linear)
        return {"native_class": kind if is_native else None}

    def _column_kwargs(self, name: str) -> dict[str, Any]:
        table, fused = self._table, self._table.fused.get(name)
        kwargs: dict[str, Any] = {"reduce_input_gradient": False}
        _, outputs = widths(self.layer.get_submodule(name))
        if isinstance(fused, HeadOrder):
            if self.heads.copies > 1:
                kwargs["num_key_value_heads"] = self.heads.padded_key_value
            return kwargs | _sizes(self.heads.fused_cut(fused, outputs))
        if name in table.key_value:
            cut = self.heads.key_value_cut(outputs)
            return kwargs | _sizes(cut) | {"copies": cut.copies}
        if table.region_of(name) in table.attention:
            return kwargs | _sizes(self.heads.query_cut(outputs, num_blocks=fused or 1))
        return kwargs | ({} if fused is None else {"split_sizes": (outputs // fused,) * fused})

    def _row_kwargs(self, name: str) -> dict[str, Any]:
        if name not in self._table.attention.values():
            return {}
        inputs, _ = widths(self.layer.get_submodule(name))
        return _sizes(self.heads.query_cut(inputs))

    def _norm_kwargs(self, name: str) -> dict[str, Any]:
        cut, weight = self._cut_of(name), self.layer.get_submodule(name).get_parameter("weight")
        return {"copies": self._copies(name), **({} if cut is None else _sizes(cut(weight.shape[0])))}

    def _cut_of(self, name: str) -> Callable[[int], Cut] | None:
        """Cut between heads, from the number of entries; None where no heads are padded."""
        table = self._table
        if table.region_of(name) not in table.attention and not (table.attention and name in table.biases):
            return None
        if name in table.key_value:
            return self.heads.key_value_cut
        fused = table.fused.get(name, 1)
        if isinstance(fused, HeadOrder):
            return partial(self.heads.fused_cut, fused)
        return partial(self.heads.query_cut, num_blocks=fused)

    def _copies(self, name: str) -> int:
        """Number of neighbouring ranks that hold the same piece."""
        return self.heads.copies if name in self._table.key_value else 1

    def _by_head(self, region: str) -> dict[str, Any]:
        names = self._table.by_head.get(region)
        if names is None:
            return {}
        for name in names:
            self._require_input(region, name)
        local = self.heads.local_to(self._group.rank())
        return {"by_head": names, "num_heads": self.heads.query, "local_heads": local}

    @property
    def heads(self) -> Heads:
        """Heads of its attention."""
        heads, table = heads_of(self._config, self.layer, self._table, self._group.size()), self._table
        if not table.attention and heads.key_value % heads.ranks and heads.ranks % heads.key_value:
            name = (table.key_value_heads or "num_key_value_heads").rpartition(".")[2]
            count = heads.key_value
            sizes = [size for size in divisors(heads.query) if count % size == 0 or size % count == 0]
            raise ValueError(
                f"{name}={count} neither divides tp_size={heads.ranks} nor is divided by it: use one of "
                f"tp_size={sizes}"
            )
        return heads

    def _split_randoms(self) -> dict[str, SplitRandom]:
        """A random state per region that drops at random, none for a probability of 0."""
        device = next(self.layer.parameters()).device
        return {
            region: SplitRandom(self._group.rank(), device)
            for region, dropout in self._table.dropout.items()
            if region in active_regions(self.layer, self._table)
            and attribute(self.layer, dropout.probability) > 0
        }


def split_parameter(
    root: nn.Module,
    path: str,
    dim: int,
    *,
    copies: int = 1,
    num_blocks: Any = 1,
    cut: Callable[[int], Cut] | None = None,
) -> list[Replacement]:
    """The split of a parameter as it is, where it is.

    Args:
        root: a layer or a model.
        path: of the parameter, seen from there.
        dim: the dimension that is cut.
        copies: how many neighbouring ranks hold the same piece.
        num_blocks: how many blocks of equal length it fuses along that dimension, each cut on its own.
        cut: between heads, from the length of that dimension; None cuts it evenly.
    """
    owner, _, name = path.rpartition(".")
    parameter = dict(root.named_parameters(remove_duplicate=False)).get(path)
    if parameter is None:
        return []
    length = parameter.shape[dim]
    sizes: dict[str, Any] = {"split_sizes": (length // num_blocks,) * num_blocks}
    if cut is not None:
        sizes = _sizes(cut(length))
    kwargs = {"name": name, "dim": dim, "copies": copies, **sizes}
    return [Replacement(suffix=owner, target_module=SplitParameter, kwargs=kwargs)]


def _sizes(cut: Cut) -> dict[str, Any]:
    """The arguments of a linear layer that is cut so."""
    return {"split_sizes": cut.blocks, "padded_sizes": cut.padded, "stretches": cut.stretches}


def widths(projection: Any) -> tuple[int, int]:
    """Input and output features of an nn.Linear or of transformers' Conv1D, perhaps inside of LoRA."""
    projection = plain(projection)
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"this {type(projection).__name__} is not a plain linear layer of one weight: name a linear layer"
        )
    rows, columns = weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def heads_of(config: Any, layer: nn.Module, table: Table, ranks: int) -> Heads:
    """The heads of a layer's attention; of one that is not yet split."""

    def number(path: str | None, name: str, entry: str) -> int:
        if path is not None:
            return int(attribute(layer, path))
        return int(setting(config, name, f"name the layer's own attribute in {entry}"))

    query = number(table.query_heads, "num_attention_heads", "query_heads")
    if not table.has_key_value_heads:
        return Heads(query=query, key_value=query, ranks=ranks)
    key_value = number(table.key_value_heads, "num_key_value_heads", "key_value_heads")
    return Heads(query=query, key_value=key_value, ranks=ranks)


def setting(config: Any, name: str, advice: str) -> Any:
    """A setting of a model's config that a table needs."""
    found = getattr(config, name, None)
    if found is None:
        lack = "the model has none" if config is None else f"a {type(config).__name__} has no such setting"
        raise ValueError(f"the table takes {name} from the model's config, and {lack}: {advice}")
    return found


def require_divisible(name: str, count: int, ranks: int) -> None:
    """Raise ValueError unless the ranks divide a count."""
    if count % ranks:
        raise ValueError(
            f"{name}={count} is not divisible by tp_size={ranks}: use one of tp_size={divisors(count)}"
        )


def _present_attributes(layer: nn.Module, attributes: Iterable[str]) -> list[str]:
    """List the attributes whose modules the layer has."""
    return [path for path in attributes if has_submodule(layer, path.rpartition(".")[0])]
