"""The policy of a table. Tables are in tables/; layer_split.py shards one layer, sharder.py applies the policy."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..cluster.errors import raise_errors
from ..cluster.layout import divisors
from ..cluster.placement import ReplicaKind, Replicated
from ..cluster.transformers_api import grouped_width
from ..pipeline.stage_plan import StagePlan, is_within
from ..pipeline.stand_ins import StandIn
from .layer_split import LayerSplit, cut_arguments, require_divisible, setting
from .layers.embedding import VocabParallelEmbedding1D, VocabParallelLMHead1D
from .layers.forward_code import returns_tuple
from .layers.region import CommonInput, SplitParameter
from .layers.sequence_axis import axis_of
from .layers.split_gather import RegionSequence
from .layers.vocabulary_loss import reads_weights, route_loss
from .policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    join,
)
from .shard_config import ShardConfig
from .tables.table import (
    PartStages,
    Table,
    active_regions,
    has_parameter,
    has_submodule,
    layers_of,
    present_modules,
    table_for,
)


class TablePolicy(Policy):
    """Shard a transformers model by a table of names.

    [Note: parts] A model may consist of other models (a vision model, a language model), called parts, each with
    a config and layers of its own. Each part has a policy of its own, and the policy of the model combines them.
    """

    gathers_sequences = True

    def __init__(self, table: Table) -> None:
        self.table = self._table_for_newest = table
        self._parts: dict[str, TablePolicy] = {}  # by path in the model
        self._common_input = CommonInput()
        self._replica_kinds: dict[
            str, ReplicaKind | None
        ] = {}  # of layers' parameters by name; see `replica`

    def set_model(self, model: nn.Module) -> None:
        """Set the model of the policy, and of the policies of its parts.

        Raises:
            ValueError: there is no table for a part.
        """
        super().set_model(model)
        self._common_input = CommonInput()
        self.table = table_as_installed(self._table_for_newest, model, self._full_path)
        part_tables = {self._full_path(path): table for path, table in self.table.parts.items()}
        self._parts = {}
        errors = []
        for path in present_modules(model, part_tables):
            part: Any = model.get_submodule(path)
            table = part_tables[path] or table_for(part.config.model_type)
            if table is None:
                errors.append(
                    f"there is no table to shard {path} of this {type(model).__name__} "
                    f"(model_type={part.config.model_type!r}): write one and register it for this model "
                    "type, or use tp_size=1 and pp_size=1"
                )
                continue
            self._parts[path] = TablePolicy(table)
            if not errors:
                self._parts[path].set_model(part)
        raise_errors(errors)

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the requested axes and options, for the parts too."""
        super().set_shard_config(shard_config)
        for part in self._parts.values():
            part.set_shard_config(shard_config)

    def config_errors(self) -> list[str]:
        """List errors of `shard_config`: those that the table states, and those of every policy."""
        errors = list(self.table.pipeline_errors) if self.shard_config.num_stages > 1 else []
        if self.shard_config.tensor_parallel_size > 1:
            errors = [*self._tensor_errors(), *errors]
        return [*errors, *super().config_errors()]

    def tables(self) -> str | None:
        """Return the tables of the model and its parts, as text; None for classes of other packages."""
        if not type(self).__module__.startswith(f"{__package__}."):
            return None
        return repr([self.table, *((path, part.tables()) for path, part in self._parts.items())])

    def stage_plan(self) -> StagePlan:
        """Return the table's stage plan, with paths from the full model."""
        if isinstance(self.table.stage, StagePlan):
            return self.table.stage.under(self._base_prefix()).fitted(self.model)
        stages = self._pipelined_part()
        path = self._full_path(stages.part)
        return (
            self._parts[path]
            .stage_plan()
            .under(path)
            .with_modules_before(
                entry=tuple(map(self._full_path, stages.entry)),
                leading=tuple(
                    self._full_path(name)
                    for name in stages.leading
                    if name not in stages.optional or has_submodule(self.model, self._full_path(name))
                ),
                everywhere=tuple(map(self._full_path, stages.everywhere)),
            )
        )

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        """Return the changes of layers, embedding and head."""
        if self.shard_config.tensor_parallel_size == 1:
            return {}
        attributes, replacements = self._changes("")
        # By path and not by class: layers of an encoder and a decoder may have the same class and different changes.
        return {
            type(self.model): ModulePolicyDescription(
                attribute_replacement=attributes, sub_module_replacement=tuple(replacements)
            )
        }

    def _changes(self, prefix: str) -> tuple[dict[str, Any], list[SubModuleReplacementDescription]]:
        """Return new attributes and replacements of the model and its local parts, by paths from the full model.

        Also set `_replica_kinds`, which `replica` returns afterwards, and add errors of modules and settings.

        Args:
            prefix: path of this model in the full one.
        """
        self._add_setting_errors(prefix)
        self._replica_kinds = {}
        attributes, replacements = dict[str, Any](), self._vocabulary_replacements(prefix)
        layers = self._layer_splits(prefix)
        if layers:
            replacements += self._shared_biases(prefix, next(iter(layers.values())))
        for path, split in layers.items():
            with self.errors.at(path):
                if not isinstance(split.layer, StandIn):
                    replacements += split.replacements()
                    attributes |= split.attributes()
                    self._replica_kinds |= split.replicas()
            with self.errors.at(path):  # also where another stage's layer is local for a parameter alone
                replacements += split.split_parameters()
        for path, part in self._parts.items():
            if _is_local(self.model, path):
                part.errors = self.errors
                part_attributes, part_replacements = part._changes(join(prefix, path))
                attributes |= part_attributes
                replacements += part_replacements
                self._replica_kinds |= part._replica_kinds
        return attributes, replacements

    def replica(self, name: str, axis: str) -> ReplicaKind | None:
        """Return how the table declares a parameter of a layer; outside of layers every rank computes the same."""
        return self._replica_kinds.get(name, Replicated)

    def _vocabulary_replacements(self, prefix: str) -> list[SubModuleReplacementDescription]:
        """Return the replacements of token embeddings and head, sharded over the vocabulary."""
        embeddings = [] if self.table.embedding is None else [self._full_path(self.table.embedding)]
        embeddings += present_modules(self.model, map(self._full_path, self.table.further_embeddings))
        targets: dict[str, Any] = dict.fromkeys(embeddings, VocabParallelEmbedding1D)
        if head := self.head_path():
            targets[head] = VocabParallelLMHead1D
        vocabulary = {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}
        replacements = []
        for name, target in targets.items():
            if not has_submodule(self.model, name):
                self.errors.add(
                    prefix, f"the table names {name!r}, and the model has no such module: correct the name"
                )
            elif _is_local(self.model, name):
                replacements.append(
                    SubModuleReplacementDescription(
                        suffix=join(prefix, name), target_module=target, kwargs=vocabulary
                    )
                )
        return replacements

    def _shared_biases(self, prefix: str, first_layer: LayerSplit) -> list[SubModuleReplacementDescription]:
        """Return the replacements that shard biases outside of the layers, which all layers use.

        Args:
            prefix: path of this model in the full one.
            first_layer: any layer, for its numbers of heads.
        """
        replacements = []
        for path, dim in self.table.shared_biases.items():
            owner, _, name = self._full_path(path).rpartition(".")
            if has_parameter(self.model, f"{owner}.{name}"):
                length = self.model.get_parameter(f"{owner}.{name}").shape[dim]
                # Without attention there are no heads: sharded evenly.
                cut = cut_arguments(first_layer.heads.query_cut(length)) if self.table.attention else {}
                replacements.append(
                    SubModuleReplacementDescription(
                        suffix=join(prefix, owner),
                        target_module=SplitParameter,
                        kwargs={"name": name, "dim": dim, **cut},
                    )
                )
        return replacements

    def _layer_splits(self, prefix: str) -> dict[str, LayerSplit]:
        """Return the sharding of each layer by its path from the full model, without the layers of parts.

        All layers of a list must have the same class, unless every name of the table is optional (derived, and tried).
        """
        group = self.shard_config.tensor_parallel_process_group
        assert group is not None
        splits: dict[str, LayerSplit] = {}
        for stack in self._stacks():
            layers = layers_of(self.model, [stack])
            kinds = {type(layer.native if isinstance(layer, StandIn) else layer) for layer in layers.values()}
            if len(kinds) > 1 and not {*self.table.modules} <= {*self.table.optional}:
                names = sorted(kind.__name__ for kind in kinds)
                self.errors.add(
                    join(prefix, stack),
                    f"the layers are of several classes, {names}, but a table describes one: use tp_size=1",
                )
            for path, layer in layers.items():
                splits[join(prefix, path)] = LayerSplit(
                    self.table,
                    layer,
                    getattr(self.model, "config", None),
                    group,
                    sequence=self._sequence_around(layer),
                    common_input=self._common_input,
                    path=join(prefix, path),
                    errors=self.errors,
                )
        return splits

    def modules_with_shards(self) -> Iterator[nn.Module]:
        """Yield the modules of all layers, uncut, whose forwards compute with sharded activations."""
        for layer in layers_of(self.model, self._stacks()).values():
            for region in active_regions(layer, self.table):
                inside = list(layer.get_submodule(region).modules())
                # What follows a linear layer is computed by the module around it.
                yield from inside if len(inside) > 1 else [layer.get_submodule(region.rpartition(".")[0])]
        for part in self._parts.values():
            yield from part.modules_with_shards()

    def _add_setting_errors(self, prefix: str) -> None:
        """Add errors of config settings that the table does not support, or that the ranks do not divide."""
        config, ranks = getattr(self.model, "config", None), self.shard_config.tensor_parallel_size
        for name, needed in self.table.needed.items():
            if getattr(config, name, needed) != needed:
                self.errors.add(
                    prefix,
                    f"{name}={getattr(config, name)!r} in the model's config is not supported with tensor "
                    f"parallelism: use {name}={needed!r} or tp_size=1",
                )
        uses_divisible = self.table.column and not (self.table.attention or self.table.divide)
        for name in self.table.divisible if uses_divisible else ():
            with self.errors.at(prefix):
                require_divisible(name, setting(config, name, self._divide_advice()), ranks)

    def _divide_advice(self) -> str:
        """Return the end of an error about a table without `divide`: how to name the sizes that sharding changes.

        It proposes integer attributes in the sharded regions of the first layer. Modules with parameters are left out:
        their integers are the sizes of the parameters, which sharding updates anyway.
        """
        layer = next(iter(layers_of(self.model, self._stacks()).values()))
        sizes = []
        for path, module in layer.named_modules():
            is_in_region = any(is_within(path, region) for region in self.table.regions)
            has_parameters = next(module.parameters(recurse=False), None) is not None
            if is_in_region and not has_parameters:
                sizes += [
                    f"{join(path, name)}={value}"
                    for name, value in vars(module).items()
                    if type(value) is int and value > 1 and not name.startswith("_")
                ]
        candidates = f" of {', '.join(sizes)}" if sizes else ""
        return (
            f"name in divide those{candidates} that a rank's shard changes (heads, the width of all heads), and also "
            "in divisors those by which the full width is divided; without any, give divisible=()"
        )

    def postprocess(self) -> nn.Module:
        """Route the loss to a sharded head, and refuse output_attentions, which would be sharded over ranks.

        Raises:
            ValueError: the model's config has output_attentions, or its forward reads the weight of the head.
        """
        if self.shard_config.tensor_parallel_size > 1 and hasattr(self.model, "config"):
            _refuse_attentions(self.model, (), {}, source="the model's config")
            self.model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
        self.route_losses()
        return self.model

    def route_losses(self) -> None:
        """Compute the losses of the model and its parts from sharded logits, where possible."""
        for path, part in self._parts.items():
            if _is_local(self.model, path):
                part.route_losses()
        name = self.head_path() or ""
        head = self.model.get_submodule(name)
        if not isinstance(head, VocabParallelLMHead1D):
            return
        if reads_weights(self.model):
            raise ValueError(
                f"the forward of this {type(self.model).__name__} reads a weight itself (a fused loss does), "
                "but the head's weight is sharded: use transformers' own forward, or tp_size=1"
            )
        if not self.shard_config.fused.takes_loss(self.model):
            route_loss(self.model, name, parallel_output=self.shard_config.parallel_output)

    def _pipelined_part(self) -> PartStages:
        """Return the part whose layers become pipeline stages: the first in the table that this class of model has."""
        assert not isinstance(self.table.stage, StagePlan)
        stages = next(
            (candidate for candidate in self.table.stage if self._full_path(candidate.part) in self._parts),
            None,
        )
        if stages is None:
            raise ValueError(
                f"this {type(self.model).__name__} has none of the parts "
                f"{[candidate.part for candidate in self.table.stage]}, whose layers become pipeline stages: use a "
                "class that has one, or a policy of your own (custom_policy=...)"
            )
        return stages

    def _tensor_errors(self) -> list[str]:
        """List the errors that the table and the tables of the parts state for tensor parallelism."""
        parts = [f"{path}: {error}" for path, part in self._parts.items() for error in part._tensor_errors()]
        return [*self.table.tensor_errors, *parts]

    def _sequence_around(self, layer: nn.Module) -> RegionSequence | None:
        """Return the sequence sharding around the regions of a layer; None if sequences are unsharded."""
        axis, settings = axis_of(layer), self.shard_config.sequence
        if axis is None or not settings.is_on_tensor_axis:
            return None
        return RegionSequence(axis=axis, regathers=settings.regathers, overlap=settings.overlaps)

    def _base_prefix(self) -> str:
        """Return the path of the base model in the model; "" if it is the model."""
        base = getattr(self.model, "base_model", self.model)
        return "" if base is self.model else str(self.model.base_model_prefix)

    def _stacks(self) -> list[str]:
        """Return the paths of the model's own lists of layers, without those of its parts."""
        if not isinstance(self.table.stage, StagePlan):
            return []
        stacks = self.stage_plan().stacks(self.model)
        return [path for stack in stacks for path in stack.plan.list_paths(self.model)]

    def _full_path(self, path: str) -> str:
        """Return the path from the full model of a path in the base model."""
        return join(self._base_prefix(), path)

    def head_path(self) -> str | None:
        """Return the path of the language-model head, or None if this class of model has none."""
        names = [name for name in self.table.heads if has_submodule(self.model, name)]
        return names[0] if names else None


def _is_local(model: nn.Module, path: str) -> bool:
    """Return True if the module at a path is on a stage of this rank: neither a stand-in nor inside one."""
    module = model
    for name in path.split("."):
        module = module.get_submodule(name)
        if isinstance(module, StandIn):
            return False
    return True


def _refuse_attentions(model: Any, args: tuple, kwargs: dict[str, Any], *, source: str = "this call") -> None:
    """Raise ValueError if a call, or else the model's config, asks for attention weights. Also a forward pre-hook.

    Args:
        model, args, kwargs: the model and arguments of the call; only keyword arguments are read.
        source: what asks for them, for the error.
    """
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(model.config, "output_attentions", False)
    if asked:
        raise ValueError(
            f"output_attentions=True in {source} would return only the local heads' attention on each rank: "
            "leave it out or use tp_size=1"
        )


def table_as_installed(table: Table, model: nn.Module, full_path: Callable[[str], str]) -> Table:
    """Adapt a table to the installed transformers: older releases have other names, and layers that return tuples.

    Args:
        table: the table for the newest release.
        model: the full model; may be on the meta device.
        full_path: converts a path from the base model into one from the model.
    """
    installed = next(
        (older for path, older in table.older.items() if has_submodule(model, full_path(path))), table
    )
    if isinstance(installed.stage, StagePlan):
        return replace(installed, stage=_with_arity(installed.stage, model, full_path))
    return installed


def _with_arity(plan: StagePlan, model: nn.Module, full_path: Callable[[str], str]) -> StagePlan:
    """Set the arity of a plan to 1 if its layers return a tuple of one tensor instead of a tensor (arity 0).

    So too for the plan of its encoder.
    """
    encoder = None if plan.encoder is None else _with_arity(plan.encoder, model, full_path)
    path = full_path(plan.layers)
    layers = layers_of(model, [path]) if has_submodule(model, path) else {}
    one_of_class = {type(layer): layer for layer in layers.values()}
    if plan.arity == 0 and any(returns_tuple(layer) for layer in one_of_class.values()):
        plan = replace(plan, arity=1)
    return replace(plan, encoder=encoder)


_ROW = 16  # bytes: row sizes in torch's grouped product are multiples of it


def expert_width_errors(model: nn.Module, *, tp_size: int, dtype: torch.dtype) -> list[str]:
    """List reasons why torch's grouped product cannot compute with shards of experts; empty if it can.

    Args:
        model: the full model, whose experts are sharded by their inner width.
        tp_size: number of ranks.
        dtype: format of the computation.
    """
    errors: dict[int, str] = {}  # by width
    for path, module in model.named_modules():
        if (width := grouped_width(module)) is None:
            continue
        valid_sizes = [size for size in divisors(width) if width // size * dtype.itemsize % _ROW == 0]
        if width % tp_size == 0 and tp_size not in valid_sizes:
            smaller = [str(size) for size in valid_sizes if size < tp_size]
            errors.setdefault(
                width,
                f"tp_size={tp_size} gives each rank {width // tp_size} of the {width} columns of {path}, but "
                f"torch's grouped_mm needs rows of a multiple of {_ROW} bytes: "
                + (f"use tp_size={' or '.join(smaller)}, or call " if smaller else "call ")
                + "model.set_experts_implementation('eager') before boost",
            )
    return list(errors.values())
