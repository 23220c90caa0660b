"""The policy that a table makes. Tables are in tables/, carrying out is sharder.py."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..cluster.random import SplitRandom
from ..pipeline.plan import StagePlan
from ..pipeline.stand_in import StandIn
from .config_view import ConfigView
from .head_order import HeadOrder, Heads
from .layer.embedding import VocabParallelEmbedding1D, VocabParallelLMHead1D
from .layer.held_count import HeldCount
from .layer.key_value import SharedKeyValueLinear1D_Col
from .layer.linear import (
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from .layer.loss import route_loss
from .layer.region import JoinedEntry, JoinedRegion, PartialGradient, Region, SplitParameter
from .policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from .shard_config import ShardConfig
from .table import PartStages, Table, table_for
from .table_faults import (
    ATTENTIONS_FAULT,
    has_parameter,
    has_submodule,
    heads_of,
    layers_of,
    native_class,
    present,
    split_paths,
    table_faults,
    tie_faults,
    widths,
)

Replacement = SubModuleReplacementDescription


class TablePolicy(Policy):
    """Splits a transformers model by a table of names.

    [Note: parts] A model may be made of others (a vision model, a language model), each with a config and layers of
    its own. Each is split by a policy of its own, and the policy of the whole gathers what they say.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._parts: dict[str, TablePolicy] = {}

    def set_model(self, model: nn.Module) -> None:
        """Give the policy the model that it is for, and those of the parts theirs."""
        super().set_model(model)
        self._parts = {}
        for path, table in self._part_tables().items():
            if table is not None:
                self._parts[path] = TablePolicy(table)
                self._parts[path].set_model(model.get_submodule(path))

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Give the policy, and those of the parts, what is asked for."""
        super().set_shard_config(shard_config)
        for part in self._parts.values():
            part.set_shard_config(shard_config)

    def faults(
        self, *, tp_size: int = 1, num_stages: int = 1, num_layers_per_stage: Sequence[int] | None = None
    ) -> list[str]:
        """All reasons why this model cannot be split so, each with what would work. No communication."""
        if missing := self._part_faults() or self.stage_plan().path_faults(self.model):
            return missing
        return [
            *self._split_faults(tp_size),
            *(tie_faults(self.model, self._split_paths()) if tp_size > 1 else []),
            *super().faults(
                tp_size=tp_size, num_stages=num_stages, num_layers_per_stage=num_layers_per_stage
            ),
        ]

    @property
    def _config(self) -> Any:
        return self.model.config

    def stage_plan(self) -> StagePlan:
        """The table's plan, seen from the whole model."""
        if isinstance(self.table.stage, StagePlan):
            return self.table.stage.under(self._base_prefix()).fitted(self.model)
        stages = self._stages_part()
        assert stages is not None
        path = self._from_model(stages.part)
        return (
            self._parts[path]
            .stage_plan()
            .under(path)
            .after(
                entry=tuple(map(self._from_model, stages.entry)),
                leading=tuple(map(self._from_model, stages.leading)),
                everywhere=tuple(map(self._from_model, stages.everywhere)),
            )
        )

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        """What becomes of layers, embedding and head."""
        if self.shard_config.tensor_parallel_size == 1:
            return {}
        described = self._described()
        # By path and not by class: an encoder's and a decoder's layers may be of one class and differ.
        return {
            type(self.model): ModulePolicyDescription(
                attribute_replacement={
                    _join(path, name): value
                    for path, own in described.items()
                    for name, value in own.attribute_replacement.items()
                },
                sub_module_replacement=tuple(
                    replace(replacement, suffix=_join(path, replacement.suffix))
                    for path, own in described.items()
                    for replacement in own.sub_module_replacement
                ),
            )
        }

    def _described(self) -> dict[str, ModulePolicyDescription]:
        """What becomes of the model itself and of each part that is held, by its path."""
        found = {"": self._own_policy()}
        for path, part in self._parts.items():
            if _is_held(self.model, path):
                found |= {_join(path, inner): own for inner, own in part._described().items()}
        return found

    def _own_policy(self) -> ModulePolicyDescription:
        """What becomes of the model's own layers, embedding and head, without those of its parts."""
        vocabulary = {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}
        ends = [
            Replacement(suffix=name, target_module=target, kwargs=vocabulary)
            for name, target in self._ends().items()
            if _is_held(self.model, name)
        ]
        shared_biases = [
            replacement
            for path, dim in self.table.shared_biases.items()
            for replacement in _split_parameter(self.model, self._from_model(path), dim)
        ]
        all_layers = layers_of(self.model, self._stacks())
        layers = {path: layer for path, layer in all_layers.items() if not isinstance(layer, StandIn)}
        return ModulePolicyDescription(
            attribute_replacement={
                f"{path}.{name}": value
                for path, layer in layers.items()
                for name, value in self._attributes(layer).items()
            },
            sub_module_replacement=(
                *ends,
                *shared_biases,
                *(
                    replace(replacement, suffix=f"{path}.{replacement.suffix}")
                    for path, layer in layers.items()
                    for replacement in self._replacements(layer)
                ),
                # Also where another stage's layer is held for this parameter alone.
                *(
                    replace(replacement, suffix=f"{path}.{replacement.suffix}")
                    for path, layer in all_layers.items()
                    for replacement in self._split_parameters(layer)
                ),
            ),
        )

    def postprocess(self) -> nn.Module:
        """Route the loss of a split head, and refuse calls whose results would be a rank's part of them."""
        if self.shard_config.tensor_parallel_size > 1 and hasattr(self.model, "config"):
            self.model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
        self.route_losses()
        return self.model

    def route_losses(self) -> None:
        """Let the model and its parts compute their losses from split logits, where they can."""
        for path, part in self._parts.items():
            if _is_held(self.model, path):
                part.route_losses()
        head = self.model.get_submodule(name) if (name := self._head_name()) else None
        if isinstance(head, VocabParallelLMHead1D):
            route_loss(self.model, head, parallel_output=self.shard_config.parallel_output)

    def _stages_part(self) -> PartStages | None:
        """The part whose layers a pipeline cuts: the first of the table's that this class of model has."""
        assert not isinstance(self.table.stage, StagePlan)
        held = (each for each in self.table.stage if self._from_model(each.part) in self._parts)
        return next(held, None)

    def _part_tables(self) -> dict[str, Table | None]:
        """The table of each part that this class of model has, by its path; None where there is none."""
        parts = {self._from_model(path): table for path, table in self.table.parts.items()}
        return {
            path: parts[path] or table_for(self._config_of(path).model_type)
            for path in present(self.model, parts)
        }

    def _config_of(self, path: str) -> Any:
        part: Any = self.model.get_submodule(path)
        return part.config

    def _part_faults(self) -> list[str]:
        """Parts that nothing is known of, and the lack of one that a pipeline could cut."""
        kind = type(self.model).__name__
        found = [
            f"no table says how to split {path} of this {kind} (model_type={self._config_of(path).model_type!r}): "
            "write one and register it for this model type, or use tp_size=1 and pp_size=1"
            for path, table in self._part_tables().items()
            if table is None
        ]
        for path, part in self._parts.items():
            faults = part._part_faults() or part.stage_plan().path_faults(part.model)
            found += [f"in {path}: {fault}" for fault in faults]
        if not found and not isinstance(self.table.stage, StagePlan) and self._stages_part() is None:
            found.append(
                f"this {kind} has none of the parts {[each.part for each in self.table.stage]}, whose layers a "
                "pipeline cuts: use a class that has one, or a policy of your own (custom_policy=...)"
            )
        return found

    def _split_faults(self, ranks: int) -> list[str]:
        """Why model and parts cannot be split over so many ranks."""
        own = table_faults(self.model, self.table, stacks=self._stacks(), ends=self._ends(), ranks=ranks)
        parts = [
            f"in {path}: {fault}" for path, part in self._parts.items() for fault in part._split_faults(ranks)
        ]
        return [*own, *parts]

    def _split_paths(self) -> set[str]:
        own = split_paths(self.model, self.table, stacks=self._stacks(), ends=self._ends())
        return own | {_join(path, each) for path, part in self._parts.items() for each in part._split_paths()}

    def _replacements(self, layer: nn.Module) -> tuple[Replacement, ...]:
        table = self.table
        randoms = self._split_randoms(layer)
        at_row = {table.dropout[region].row: split_random for region, split_random in randoms.items()}
        return (
            *(
                Replacement(
                    suffix=name,
                    target_module=self._column_type(layer, name),
                    kwargs={
                        **self._column_kwargs(layer, name),
                        "native_class": native_class(layer.get_submodule(name), table),
                        "reduce_input_gradient": False,
                    },
                )
                for name in present(layer, table.column)
            ),
            *(
                Replacement(
                    suffix=name,
                    target_module=_by_type(layer, name, Linear1D_Row, GPT2FusedLinearConv1D_Row),
                    kwargs={
                        "split_random": at_row.get(name),
                        "native_class": native_class(layer.get_submodule(name), table),
                    },
                )
                for name in present(layer, table.row)
            ),
            # After the layers themselves, whose places they take.
            *(
                Replacement(suffix=name, target_module=JoinedRegion, kwargs={"entry": entry})
                for region in present(layer, table.joined)
                for entry in [JoinedEntry(len(table.joined[region]), split_random=randoms.get(region))]
                for name in table.joined[region]
            ),
            *(
                Replacement(suffix=name, target_module=PartialGradient)
                for name in present(layer, table.partial)
            ),
            *(
                Replacement(suffix=owner, target_module=PartialGradient, kwargs={"name": name})
                for path in table.partial
                if has_parameter(layer, path)
                for owner, _, name in [path.rpartition(".")]
            ),
            # Last: a region may be a single column-split layer, which has just taken the native one's place.
            *(
                Replacement(
                    suffix=name,
                    target_module=Region,
                    kwargs={
                        "split_random": randoms.get(name),
                        "second_input": table.second_input.get(name),
                        **self._by_head(name),
                    },
                )
                for name in present(layer, table.regions)
                if name not in table.joined
            ),
        )

    def _split_parameters(self, layer: nn.Module) -> list[Replacement]:
        return [
            replacement
            for path, dim in (*self.table.split.items(), *self.table.biases.items())
            for copies in [self._heads(layer).copies if path in self.table.key_value else 1]
            for replacement in _split_parameter(layer, path, dim, copies=copies)
        ]

    def _column_kwargs(self, layer: nn.Module, name: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        fused = self.table.fused.get(name)
        if fused is not None:
            _, outputs = widths(layer.get_submodule(name))
            if isinstance(fused, HeadOrder):
                heads = self._heads(layer)
                kwargs["split_sizes"] = heads.block_sizes(fused, outputs)
                kwargs["stretches"] = heads.stretches(fused)
                if heads.copies > 1:
                    kwargs["num_key_value_heads"] = heads.key_value
            else:
                kwargs["split_sizes"] = (outputs // fused,) * fused
        if name in self.table.key_value:
            kwargs["copies"] = self._heads(layer).copies
        return kwargs

    def _column_type(self, layer: nn.Module, name: str) -> Any:
        if isinstance(self.table.fused.get(name), HeadOrder) and self._heads(layer).copies > 1:
            return SharedKeyValueLinear1D_Col
        return _by_type(layer, name, Linear1D_Col, GPT2FusedLinearConv1D_Col)

    def _by_head(self, region: str) -> dict[str, Any]:
        names = self.table.by_head.get(region)
        return {} if names is None else {"by_head": names, "num_heads": self._config.num_attention_heads}

    def _attributes(self, layer: nn.Module) -> dict[str, Any]:
        """New values of the layer's attributes by path; a module's config is one, changed for this module alone."""
        table, ranks = self.table, self.shard_config.tensor_parallel_size
        values: dict[str, Any] = {}
        for path in _held(layer, table.divide):
            whole = _attribute(layer, path)
            values[path] = HeldCount(whole // ranks, whole) if path in table.divisors else whole // ranks
        if table.groups is not None or table.divide_key_value:
            heads = self._heads(layer)
            if table.groups is not None:
                values[table.groups] = _attribute(layer, table.groups) // heads.copies
            for path in _held(layer, table.divide_key_value):
                values[path] = _attribute(layer, path) * heads.copies // ranks
        for path in table.divide:
            config, _, name = path.rpartition(".")
            if path not in values and has_submodule(layer, config.rpartition(".")[0]):
                known = values.get(config, _attribute(layer, config))
                values[config] = ConfigView(known, **{name: _attribute(layer, path) // ranks})
        return values

    def _heads(self, layer: nn.Module) -> Heads:
        return heads_of(self._config, layer, self.table, self.shard_config.tensor_parallel_size)

    def _split_randoms(self, layer: nn.Module) -> dict[str, SplitRandom]:
        """A random state per region that drops at random, none for a probability of 0."""
        group = self.shard_config.tensor_parallel_process_group
        assert group is not None
        device = next(layer.parameters()).device
        return {
            region: SplitRandom(group.rank(), device)
            for region, dropout in self.table.dropout.items()
            if has_submodule(layer, region) and _attribute(layer, dropout.probability) > 0
        }

    def _base_prefix(self) -> str:
        base = getattr(self.model, "base_model", self.model)
        return "" if base is self.model else str(self.model.base_model_prefix)

    def _stacks(self) -> list[str]:
        """The paths of the model's own lists of layers, without those of its parts."""
        if not isinstance(self.table.stage, StagePlan):
            return []
        stacks = self.stage_plan().stacks(self.model)
        return [path for stack in stacks for path in stack.plan.lists(self.model)]

    def _ends(self) -> dict[str, Any]:
        """The paths of embeddings and head, and what takes their places."""
        further = present(self.model, map(self._from_model, self.table.further_embeddings))
        first = [] if self.table.embedding is None else [self._from_model(self.table.embedding)]
        head = self._head_name()
        return dict.fromkeys([*first, *further], VocabParallelEmbedding1D) | (
            {head: VocabParallelLMHead1D} if head else {}
        )

    def _from_model(self, path: str) -> str:
        """A path of the base model, seen from the whole model."""
        return _join(self._base_prefix(), path)

    def _head_name(self) -> str | None:
        """The language-model head's path, where this class of model has one."""
        names = [name for name in self.table.heads if has_submodule(self.model, name)]
        return names[0] if names else None


def _by_type(layer: nn.Module, name: str, linear: Any, conv1d: Any) -> Any:
    """The parallel layer for an nn.Linear or for transformers' Conv1D."""
    return conv1d if isinstance(layer.get_submodule(name), Conv1D) else linear


def _split_parameter(root: nn.Module, path: str, dim: int, *, copies: int = 1) -> list[Replacement]:
    """The split of a parameter as it is, where it is."""
    owner, _, name = path.rpartition(".")
    if path not in {held for held, _ in root.named_parameters(remove_duplicate=False)}:
        return []
    return [
        Replacement(
            suffix=owner, target_module=SplitParameter, kwargs={"name": name, "dim": dim, "copies": copies}
        )
    ]


def _is_held(model: nn.Module, path: str) -> bool:
    """Whether what is at a path, or above it, is on a stage of this rank: no stand-in is."""
    module = model
    for name in path.split("."):
        module = module.get_submodule(name)
        if isinstance(module, StandIn):
            return False
    return True


def _join(*paths: str) -> str:
    return ".".join(filter(None, paths))


def _refuse_attentions(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_attentions")
    if model.config.output_attentions if asked is None else asked:
        raise ValueError(ATTENTIONS_FAULT.format("this call"))


def _held(layer: nn.Module, attributes: Iterable[str]) -> list[str]:
    """Those attributes whose modules the layer has."""
    return [path for path in attributes if has_submodule(layer, path.rpartition(".")[0])]


def _attribute(root: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), root)
