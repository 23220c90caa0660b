"""What becomes of one layer by a table. Tables are table.py; what becomes of the whole model is table_policy.py."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..cluster.random import SplitRandom
from .adapted import is_lora, plain, plain_path
from .config_view import ConfigView
from .head_order import Cut, HeadOrder, Heads
from .layer.common_input import CommonInput
from .layer.held_count import HeldCount
from .layer.key_value import SharedKeyValueLinear1D_Col
from .layer.linear import (
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from .layer.lora import LoraSplit
from .layer.norm import SplitRMSNorm
from .layer.region import (
    JoinedEntry,
    JoinedRegion,
    PartialGradient,
    Region,
    RegionExit,
    SplitParameter,
)
from .lookup import active_regions, has_parameter, has_submodule, heads_of, native_class, present, widths
from .policy import SubModuleReplacementDescription
from .sequence.around import WholeSequence
from .sequence.layer_parts import is_any_within, parameters_of_parts, whole_paths
from .sequence.part_random import CommonRandom, PartRandom, draws, samplewise
from .sequence.regions import RegionSequence
from .table import Table

Replacement = SubModuleReplacementDescription


class LayerSplit:
    """How one layer is split.

    Args:
        table: what is split how.
        layer: the native one.
        config: of the model, where it has one.
        group: the tensor axis.
        sequence: how sequences are spread over that between regions; None leaves them whole.
        common_input: of the regions of all layers, for the second input of some; None for a layer on its own.
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
    ) -> None:
        self._table, self._layer, self._config, self._group = table, layer, config, group
        self._sequence, self._common_input = sequence, common_input or CommonInput()

    def replacements(self) -> list[Replacement]:
        """What takes the places of its sub-modules, or is done to them, in this order; the path "" is the layer."""
        randoms = self._split_randoms()
        return [*self._linear_layers(randoms), *self._marks(), *self._regions(randoms), *self._parts()]

    def split_parameters(self) -> list[Replacement]:
        """The parameters that are split as they are."""
        table = self._table
        return [
            replacement
            for path, dim in (*table.split.items(), *table.biases.items())
            for replacement in split_parameter(
                self._layer,
                path,
                dim,
                copies=self._copies(path),
                num_blocks=table.fused.get(path, 1),
                cut=self._cut_of(path),
            )
        ]

    def attributes(self) -> dict[str, Any]:
        """New values of its attributes by path; a module's config is one, changed for this module alone."""
        table, layer = self._table, self._layer
        values: dict[str, Any] = {}
        for path in _held(layer, table.divide):
            whole = _attribute(layer, path)
            held = self._held_count(path, whole)
            values[path] = HeldCount(held, whole) if path in table.divisors else held
        attends = not table.key_value or present(layer, table.key_value)  # some layers attend otherwise
        if table.groups is not None and attends:
            heads = self.heads
            values[table.groups] = heads.padded_group // heads.copies
        for path in _held(layer, table.divide_key_value):
            heads = self.heads
            whole = _attribute(layer, path) * heads.padded_key_value // heads.key_value
            values[path] = whole * heads.copies // heads.ranks
        for path in table.divide:
            config, _, name = path.rpartition(".")
            if path not in values and _has_attribute(layer, config):
                known = values.get(config, _attribute(layer, config))
                values[config] = ConfigView(known, **{name: self._held_count(path, _attribute(layer, path))})
        return values

    def _held_count(self, path: str, whole: int) -> int:
        """What this rank holds of so many, counted with the heads of zeros where they are counts of heads."""
        if self._table.region_of(path) in self._table.attention:
            whole = whole * self.heads.padded_query // self.heads.query
        return whole // self._group.size()

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
            (each.suffix for each in linear if is_lora(self._layer.get_submodule(each.suffix))),
            lambda name: LoraSplit,
            lambda name: {"split_random": randoms.get(table.region_of(name) or "")},
        )
        inside = [replace(each, suffix=plain_path(self._layer, each.suffix)) for each in linear]
        return [*inside, *adapters]

    def _marks(self) -> list[Replacement]:
        """What is marked as it is: exits, partial gradients, and norms over all heads."""
        table = self._table
        return [
            *self._put(table.exits, lambda name: RegionExit),
            *self._put(table.partial, lambda name: PartialGradient),
            *(
                Replacement(suffix=owner, target_module=PartialGradient, kwargs={"name": name})
                for path in table.partial
                if has_parameter(self._layer, path)
                for owner, _, name in [path.rpartition(".")]
            ),
            *self._put(table.norms, lambda name: SplitRMSNorm, self._norm_kwargs),
        ]

    def _regions(self, randoms: dict[str, SplitRandom]) -> list[Replacement]:
        """Entries, after the layers themselves: a region may be a single layer, or begin at several."""
        table = self._table
        regions = [name for name in active_regions(self._layer, table) if name not in table.joined]
        joined = [
            Replacement(suffix=name, target_module=JoinedRegion, kwargs={"entry": entry})
            for region in present(self._layer, table.joined)
            for entry in [JoinedEntry(split_random=randoms.get(region))]
            for name in table.joined[region]
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
        return {} if name is None else {"second_input": name, "common_input": self._common_input}

    def _parts(self) -> list[Replacement]:
        """What is done to modules that compute on parts of sequences, and to those among them that do not."""
        if self._sequence is None:
            return []
        wholes = whole_paths(self._table, self._layer)
        partial = [
            Replacement(suffix=owner, target_module=PartialGradient, kwargs={"name": name})
            for path in parameters_of_parts(self._table, self._layer)
            for owner, _, name in [path.rpartition(".")]
        ]
        around = self._put(wholes, lambda name: WholeSequence, lambda name: {"sequence": self._sequence})
        if not draws(self._layer):
            return [*partial, *around]
        by_sample = [name for name in samplewise(self._layer) if not is_any_within(name, wholes)]
        common = self._put(
            (*wholes, *by_sample), lambda name: CommonRandom, lambda name: {"layer": self._layer}
        )
        return [*partial, *around, *common, Replacement(suffix="", target_module=PartRandom)]

    def _sequence_of(self, name: str) -> RegionSequence | None:
        """How sequences are spread around a module of the layer."""
        is_whole = is_any_within(name, whole_paths(self._table, self._layer))
        return None if is_whole else self._sequence

    def _put(self, names: Iterable[str], target: Any, kwargs: Any = lambda name: {}) -> list[Replacement]:
        """Replacements of those sub-modules that the layer has; target and arguments by name."""
        return [
            Replacement(suffix=name, target_module=target(name), kwargs=kwargs(name))
            for name in present(self._layer, names)
        ]

    def _column_type(self, name: str) -> Any:
        if isinstance(self._table.fused.get(name), HeadOrder) and self.heads.copies > 1:
            return SharedKeyValueLinear1D_Col
        return GPT2FusedLinearConv1D_Col if self._is_conv1d(name) else Linear1D_Col

    def _row_type(self, name: str) -> Any:
        return GPT2FusedLinearConv1D_Row if self._is_conv1d(name) else Linear1D_Row

    def _is_conv1d(self, name: str) -> bool:
        return isinstance(plain(self._layer.get_submodule(name)), Conv1D)

    def _native(self, name: str) -> dict[str, Any]:
        return {"native_class": native_class(self._layer.get_submodule(name), self._table)}

    def _column_kwargs(self, name: str) -> dict[str, Any]:
        table, fused = self._table, self._table.fused.get(name)
        kwargs: dict[str, Any] = {"reduce_input_gradient": False}
        _, outputs = widths(self._layer.get_submodule(name))
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
        inputs, _ = widths(self._layer.get_submodule(name))
        return _sizes(self.heads.query_cut(inputs))

    def _norm_kwargs(self, name: str) -> dict[str, Any]:
        cut, weight = self._cut_of(name), self._layer.get_submodule(name).get_parameter("weight")
        return {"copies": self._copies(name), **({} if cut is None else _sizes(cut(weight.shape[0])))}

    def _cut_of(self, name: str) -> Callable[[int], Cut] | None:
        """How what has entries for heads is cut between them, from their number; None where none are added."""
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
        """How many neighbouring ranks hold the same piece."""
        return self.heads.copies if name in self._table.key_value else 1

    def _by_head(self, region: str) -> dict[str, Any]:
        names = self._table.by_head.get(region)
        if names is None:
            return {}
        held = self.heads.held_by(self._group.rank())
        return {"by_head": names, "num_heads": self.heads.query, "held_heads": held}

    @property
    def heads(self) -> Heads:
        """Those of its attention."""
        return heads_of(self._config, self._layer, self._table, self._group.size())

    def _split_randoms(self) -> dict[str, SplitRandom]:
        """A random state per region that drops at random, none for a probability of 0."""
        device = next(self._layer.parameters()).device
        return {
            region: SplitRandom(self._group.rank(), device)
            for region, dropout in self._table.dropout.items()
            if region in active_regions(self._layer, self._table)
            and _attribute(self._layer, dropout.probability) > 0
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


def _held(layer: nn.Module, attributes: Iterable[str]) -> list[str]:
    """Those attributes whose modules the layer has."""
    return [path for path in attributes if has_submodule(layer, path.rpartition(".")[0])]


def _has_attribute(layer: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return has_submodule(layer, owner) and hasattr(layer.get_submodule(owner), name)


def _attribute(root: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), root)
