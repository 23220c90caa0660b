"""The policy of a model type without a table: splits and stages that a small copy was tried with."""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from ..derive.build import Copy
from ..derive.double import in_double
from ..derive.plans import copy_of, isolated, stage_plan_of
from ..pipeline.stage_plan import StagePlan
from .derived import derived_table
from .layers.sequence_axis import INSTEAD
from .proposed import proposed_table
from .shard_config import ShardConfig
from .split_trial import split_departure
from .table_policy import TablePolicy
from .tables.table import Table

_NUM_TRIAL_RANKS = 2


class DerivedPolicy(TablePolicy):
    """Shard a transformers model that has no table.

    Args:
        model: the full model; may be on the meta device.
    """

    def __init__(self, model: Any) -> None:
        try:
            table = derived_table(model)
        except ValueError:  # transformers has no plan for its layers
            table = Table(stage=(), divisible=())
        super().__init__(table)
        self._full_model, self._is_proposed = model, False

    def stage_plan(self) -> StagePlan | None:  # type: ignore[override]
        """Return the plan that was derived from a small copy; without a pipeline the list of layers of the table."""
        is_required = self._may_have_stages
        if is_required or self.shard_config.sequence_split is not None:
            plan = self._derived_stages
            if not isinstance(plan, str):
                return plan.fitted(self.model)
            if is_required:
                return None
        return super().stage_plan() if isinstance(self.table.stage, StagePlan) else None

    def config_errors(self) -> list[str]:
        """List errors of `shard_config`; with the reason if no layers could be derived for stages or sequences."""
        mode, kind = self.shard_config.sequence.mode, type(self._full_model).__name__
        has_layers = mode is None or isinstance(self.table.stage, StagePlan)
        if (has_layers and not self._may_have_stages) or not isinstance(reason := self._derived_stages, str):
            return super().config_errors()
        errors = self._tensor_errors() if self.shard_config.tensor_parallel_size > 1 else []
        if self._may_have_stages:
            errors.append(
                f"no pipeline stages of a {kind} are known: {reason}. Use pp_size=1, or write a table with its "
                "StagePlan (docs/policies.md)"
            )
        if not has_layers:
            errors.append(
                f"sequence_parallelism_mode={mode!r}: no layers of a {kind} are known: {reason}: {INSTEAD}"
            )
        return errors

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the requested axes and options; for a tensor axis first derive the table by trial on a small copy."""
        if shard_config.tensor_parallel_size > 1:
            self.table = self._table_for_newest = self._table_for_tensor_axis
        super().set_shard_config(shard_config)

    @cached_property
    def _table_for_tensor_axis(self) -> Table:
        """The table by which a small copy on two ranks has the loss and gradients of one process.

        First from transformers' plan, otherwise proposed; if both fail, a table with `tensor_errors`.
        """
        kind = type(self._full_model).__name__
        errors = list(self.table.tensor_errors)
        try:
            with isolated():
                if not errors and isinstance(self.table.stage, StagePlan):
                    error = _table_error(self._copy, self.table)
                    if error is None:
                        return self.table
                    errors.append(f"transformers' plan of a {kind} departs from one process: {error}")
                table = proposed_table(self._copy, self._full_model, partial(_table_error, self._copy))
                self._is_proposed = True
                return table
        except ValueError as error:
            errors.append(
                f"no split of a {kind} gives the numbers of one process: {error}: leave tp_size at 1, register a Table "
                "of its layers (docs/policies.md), or give one as custom_policy"
            )
        return replace(self.table, tensor_errors=tuple(errors))

    @cached_property
    def _copy(self) -> Copy:
        """The small copy of the full model, on which stages and splits are tried."""
        with isolated():
            return in_double(copy_of(self._full_model))

    def small_copy(self) -> Copy:
        """Return the copy on which stages and splits are tried, too."""
        return self._copy

    def _stacks(self) -> list[str]:
        """Return the paths of the lists of layers that the table describes; the stages may be of other lists, too."""
        return super().stage_plan().list_paths(self.model) if isinstance(self.table.stage, StagePlan) else []

    @property
    def _may_have_stages(self) -> bool:
        """True if the config has several stages, or before it is set."""
        return "shard_config" not in vars(self) or self.shard_config.num_stages > 1

    @cached_property
    def _derived_stages(self) -> StagePlan | str:
        """The stage plan of the full model, or why there is none; cached, because a cut model cannot be analyzed."""
        try:
            return stage_plan_of(self._full_model, self._copy)
        except ValueError as error:
            return str(error)


def _table_error(copy: Copy, table: Table) -> str | None:
    """Return how a small copy sharded by a table differs from one process, or why it is refused; None if neither."""
    try:
        return split_departure(copy, lambda _: TablePolicy(table), _NUM_TRIAL_RANKS)
    except ValueError as error:
        return str(error)
