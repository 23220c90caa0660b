"""The policy that a table makes. Tables are in tables/, carrying out is sharder.py."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..cluster.random import SplitRandom
from ..pipeline.cut import StandIn
from ..pipeline.plan import StagePlan
from .forward_code import scales_alone
from .layer.embedding import VocabParallelEmbedding1D, VocabParallelLMHead1D
from .layer.linear import (
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from .layer.loss import route_loss
from .layer.norm import SplitRMSNorm
from .layer.region import PartialGradient, Region, RegionExit, SplitParameter
from .policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from .table import Table
from .table_faults import (
    ATTENTIONS_FAULT,
    active_regions,
    has_submodule,
    layers_of,
    present,
    table_faults,
    widths,
)

Replacement = SubModuleReplacementDescription


class TablePolicy(Policy):
    """Splits a transformers model by a table of names."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def faults(
        self, *, tp_size: int = 1, num_stages: int = 1, num_layers_per_stage: Sequence[int] | None = None
    ) -> list[str]:
        """All reasons why this model cannot be split so, each with what would work. No communication."""
        plan = self.stage_plan()
        if missing := plan.path_faults(self.model):
            return missing
        stacks, ends = self._stacks(plan), self._ends()
        return [
            *(self.table.tensor_faults if tp_size > 1 else ()),
            *(self.table.pipeline_faults if num_stages > 1 else ()),
            *table_faults(self.model, self.table, stacks=stacks, ends=ends, ranks=tp_size),
            *super().faults(
                tp_size=tp_size, num_stages=num_stages, num_layers_per_stage=num_layers_per_stage
            ),
        ]

    @property
    def _config(self) -> Any:
        return self.model.config

    def stage_plan(self) -> StagePlan:
        """The table's plan, seen from the whole model."""
        return self.table.stage.under(self._base_prefix()).fitted(self.model)

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        """What becomes of layers, embedding and head."""
        if self.shard_config.tensor_parallel_size == 1:
            return {}
        vocabulary = {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}
        plan = self.stage_plan()
        ends = [
            Replacement(suffix=name, target_module=target, kwargs=vocabulary)
            for name, target in self._ends().items()
            if self._is_held(name)
        ]
        all_layers = layers_of(self.model, self._stacks(plan))
        layers = {path: layer for path, layer in all_layers.items() if not isinstance(layer, StandIn)}
        # By path and not by class: an encoder's and a decoder's layers may be of one class and differ.
        return {
            type(self.model): ModulePolicyDescription(
                attribute_replacement={
                    f"{path}.{name}": value
                    for path, layer in layers.items()
                    for name, value in self._attributes(layer).items()
                },
                sub_module_replacement=(
                    *ends,
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
        }

    def postprocess(self) -> nn.Module:
        """Route the loss of a split head, and refuse calls whose results would be a rank's part of them."""
        if self.shard_config.tensor_parallel_size > 1:
            self.model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
        name = self._head_name() or ""
        head = self.model.get_submodule(name)
        if isinstance(head, VocabParallelLMHead1D) and scales_alone(self.model, name):
            route_loss(self.model, head, parallel_output=self.shard_config.parallel_output)
        return self.model

    def _replacements(self, layer: nn.Module) -> tuple[Replacement, ...]:
        table = self.table
        randoms = self._split_randoms(layer)
        at_row = {table.dropout[region].row: split_random for region, split_random in randoms.items()}
        return (
            *(
                Replacement(
                    suffix=name,
                    target_module=Region,
                    kwargs={"split_random": randoms.get(name), "second_input": table.second_input.get(name)},
                )
                for name in active_regions(layer, table)
            ),
            *(
                Replacement(
                    suffix=name,
                    target_module=_by_type(layer, name, Linear1D_Col, GPT2FusedLinearConv1D_Col),
                    kwargs={**self._column_kwargs(layer, name), "reduce_input_gradient": False},
                )
                for name in present(layer, table.column)
            ),
            *(
                Replacement(
                    suffix=name,
                    target_module=_by_type(layer, name, Linear1D_Row, GPT2FusedLinearConv1D_Row),
                    kwargs={"split_random": at_row.get(name)},
                )
                for name in present(layer, table.row)
            ),
            *(
                Replacement(
                    suffix=name,
                    target_module=_by_type(layer, name, Linear1D_Col, GPT2FusedLinearConv1D_Col),
                    kwargs={"gather_output": True},
                )
                for name in present(layer, table.gathered)
            ),
            *(
                Replacement(
                    suffix=name,
                    target_module=_by_type(layer, name, Linear1D_Row, GPT2FusedLinearConv1D_Row),
                    kwargs={"split_input": True},
                )
                for name in present(layer, table.scattered)
            ),
            *(Replacement(suffix=name, target_module=RegionExit) for name in present(layer, table.exits)),
            *(
                Replacement(suffix=name, target_module=PartialGradient)
                for name in present(layer, table.partial)
            ),
            *(
                Replacement(suffix=name, target_module=SplitRMSNorm, kwargs=self._copies(name))
                for name in present(layer, table.norms)
            ),
        )

    def _split_parameters(self, layer: nn.Module) -> list[Replacement]:
        held = {name for name, _ in layer.named_parameters()}
        return [
            Replacement(
                suffix=owner,
                target_module=SplitParameter,
                kwargs={"name": name, "dim": dim, "num_blocks": self.table.fused.get(path, 1)},
            )
            for path, dim in self.table.split.items()
            for owner, _, name in [path.rpartition(".")]
            if path in held
        ]

    def _column_kwargs(self, layer: nn.Module, name: str) -> dict[str, Any]:
        kwargs = self._copies(name)
        if name in self.table.fused:
            blocks = self.table.fused[name]
            _, outputs = widths(layer.get_submodule(name))
            kwargs["split_sizes"] = (outputs // blocks,) * blocks
        return kwargs

    def _copies(self, name: str) -> dict[str, Any]:
        return {"copies": self._key_value_copies()} if name in self.table.key_value else {}

    def _attributes(self, layer: nn.Module) -> dict[str, Any]:
        ranks = self.shard_config.tensor_parallel_size
        values = {path: _attribute(layer, path) // ranks for path in _held(layer, self.table.divide)}
        path = self.table.groups
        key_value = self.table.key_value
        if path is not None and (not key_value or present(layer, key_value)):  # some layers attend otherwise
            values[path] = _attribute(layer, path) // self._key_value_copies()
        return values

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

    def _key_value_copies(self) -> int:
        """How many neighbouring ranks hold the same key-value head."""
        return max(self.shard_config.tensor_parallel_size // self._config.num_key_value_heads, 1)

    def _base_prefix(self) -> str:
        base = self.model.base_model
        return "" if base is self.model else str(self.model.base_model_prefix)

    def _stacks(self, plan: StagePlan) -> list[str]:
        """The paths of the model's lists of layers, seen from the whole model."""
        return [stack.plan.layers for stack in plan.stacks(self.model)]

    def _ends(self) -> dict[str, Any]:
        """The paths of embeddings and head, and what takes their places."""
        further = present(self.model, map(self._from_model, self.table.further_embeddings))
        first = [] if self.table.embedding is None else [self._from_model(self.table.embedding)]
        embeddings = [*first, *further]
        head = self._head_name()
        return dict.fromkeys(embeddings, VocabParallelEmbedding1D) | (
            {head: VocabParallelLMHead1D} if head else {}
        )

    def _from_model(self, path: str) -> str:
        """A path of the base model, seen from the whole model."""
        return ".".join(filter(None, (self._base_prefix(), path)))

    def _head_name(self) -> str | None:
        """The language-model head's path, where this class of model has one."""
        names = [name for name in self.table.heads if has_submodule(self.model, name)]
        return names[0] if names else None

    def _is_held(self, name: str) -> bool:
        manager = self.shard_config.pipeline_stage_manager
        if manager is None:
            return True
        stages = self.stage_plan().stages_of(self.model, name, self.stage_bounds())
        return any(stage in manager.stages for stage in stages)


def _by_type(layer: nn.Module, name: str, linear: Any, conv1d: Any) -> Any:
    """The parallel layer for an nn.Linear or for transformers' Conv1D."""
    return conv1d if isinstance(layer.get_submodule(name), Conv1D) else linear


def _refuse_attentions(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_attentions")
    if model.config.output_attentions if asked is None else asked:
        raise ValueError(ATTENTIONS_FAULT.format("this call"))


def _held(layer: nn.Module, attributes: Iterable[str]) -> list[str]:
    """Those attributes whose modules the layer has."""
    return [path for path in attributes if has_submodule(layer, path.rpartition(".")[0])]


def _attribute(root: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), root)
