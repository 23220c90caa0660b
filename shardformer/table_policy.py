"""The policy that a table makes. Tables are in tables/, carrying out is sharder.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..pipeline.plan import StagePlan
from ..pipeline.stand_ins import StandIn
from .forward_code import scales_alone
from .layer.common_input import CommonInput
from .layer.embedding import VocabParallelEmbedding1D, VocabParallelLMHead1D
from .layer.loss import route_loss
from .layer_split import LayerSplit, split_parameter
from .lookup import has_submodule, layers_of, present, split_paths
from .lora_faults import dropout_faults
from .older import table_as_installed
from .policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from .sequence.axis import axis_of
from .sequence.config import SequenceParallelism
from .sequence.layer_parts import layer_part_faults
from .sequence.regions import RegionSequence, Style
from .shard_config import ShardConfig
from .table import PartStages, Table, table_for
from .table_faults import ATTENTIONS_FAULT, table_faults, tie_faults

Replacement = SubModuleReplacementDescription


class TablePolicy(Policy):
    """Splits a transformers model by a table of names.

    [Note: parts] A model may be made of others (a vision model, a language model), each with a config and layers of
    its own. Each is split by a policy of its own, and the policy of the whole gathers what they say.
    """

    def __init__(self, table: Table) -> None:
        self.table = self._newest = table
        self._parts: dict[str, TablePolicy] = {}
        self._common_input = CommonInput()

    def set_model(self, model: nn.Module) -> None:
        """Give the policy the model that it is for, and those of the parts theirs."""
        super().set_model(model)
        self._common_input = CommonInput()
        self.table = table_as_installed(self._newest, model, self._from_model)
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
        if missing := self._part_faults() or self.stage_plan().path_errors(self.model):
            return missing
        return [
            *(self._split_faults(tp_size) if tp_size > 1 else []),
            *(self.table.pipeline_faults if num_stages > 1 else ()),
            *(tie_faults(self.model, self._split_paths()) if tp_size > 1 else []),
            *super().faults(
                tp_size=tp_size, num_stages=num_stages, num_layers_per_stage=num_layers_per_stage
            ),
        ]

    def region_faults(self, settings: SequenceParallelism) -> list[str]:
        """Why the layers that a pipeline would cut cannot compute on parts of sequences between their regions."""
        if not isinstance(self.table.stage, StagePlan):
            stages = self._stages_part()
            assert stages is not None
            return self._parts[self._from_model(stages.part)].region_faults(settings)
        option = f"sequence_parallelism_mode={settings.mode!r}"
        layers = layers_of(self.model, self._stacks())
        parts = [
            f"{option}: {fault}" for each in layers.values() for fault in layer_part_faults(self.table, each)
        ]
        return [*dict.fromkeys(parts), *dropout_faults(layers, option)]

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
                leading=tuple(
                    self._from_model(name)
                    for name in stages.leading
                    if name not in stages.optional or has_submodule(self.model, self._from_model(name))
                ),
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
        all_layers = layers_of(self.model, self._stacks())
        some_layer = self._split_of(next(iter(all_layers.values()))) if self.table.shared_biases else None
        cut = some_layer.heads.query_cut if some_layer is not None and self.table.attention else None
        shared_biases = [
            replacement
            for path, dim in self.table.shared_biases.items()
            for replacement in split_parameter(self.model, self._from_model(path), dim, cut=cut)
        ]
        layers = {path: layer for path, layer in all_layers.items() if not isinstance(layer, StandIn)}
        return ModulePolicyDescription(
            attribute_replacement={
                f"{path}.{name}": value
                for path, layer in layers.items()
                for name, value in self._split_of(layer).attributes().items()
            },
            sub_module_replacement=(
                *ends,
                *shared_biases,
                *(
                    replace(replacement, suffix=_join(path, replacement.suffix))
                    for path, layer in layers.items()
                    for replacement in self._split_of(layer).replacements()
                ),
                # Also where another stage's layer is held for this parameter alone.
                *(
                    replace(replacement, suffix=_join(path, replacement.suffix))
                    for path, layer in all_layers.items()
                    for replacement in self._split_of(layer).split_parameters()
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
        name = self.head_path() or ""
        head = self.model.get_submodule(name)
        if isinstance(head, VocabParallelLMHead1D) and scales_alone(self.model, name):
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
            faults = part._part_faults() or part.stage_plan().path_errors(part.model)
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
        return [*self.table.tensor_faults, *own, *parts]

    def _split_paths(self) -> set[str]:
        own = split_paths(self.model, self.table, stacks=self._stacks(), ends=self._ends())
        return own | {_join(path, each) for path, part in self._parts.items() for each in part._split_paths()}

    def _split_of(self, layer: nn.Module) -> LayerSplit:
        group = self.shard_config.tensor_parallel_process_group
        assert group is not None
        config = getattr(self.model, "config", None)
        return LayerSplit(
            self.table,
            layer,
            config,
            group,
            sequence=self._sequence_around(layer),
            common_input=self._common_input,
        )

    def _sequence_around(self, layer: nn.Module) -> RegionSequence | None:
        """How the regions of a layer gather the sequences that are spread around them, None where they are whole."""
        axis, settings = axis_of(layer), self.shard_config.sequence
        if axis is None or not settings.is_on_tensor_axis:
            return None
        style: Style = "ring" if settings.mode == "ring" else "regather" if settings.regathers else "gather"
        return RegionSequence(axis=axis, style=style, overlap=settings.overlaps)

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
        head = self.head_path()
        return dict.fromkeys([*first, *further], VocabParallelEmbedding1D) | (
            {head: VocabParallelLMHead1D} if head else {}
        )

    def _from_model(self, path: str) -> str:
        """A path of the base model, seen from the whole model."""
        return _join(self._base_prefix(), path)

    def head_path(self) -> str | None:
        """The language-model head's path, where this class of model has one."""
        names = [name for name in self.table.heads if has_submodule(self.model, name)]
        return names[0] if names else None


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
