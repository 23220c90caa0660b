"""The policy of a model type without a table: tensors by transformers' plans, stages by running a small copy."""

from functools import cached_property
from typing import Any

from ..derive.double import in_double
from ..derive.plans import apart, copy_of, stage_plan_of
from ..pipeline.plan import StagePlan
from .derived import derived_table
from .split_trial import split_departure
from .table_policy import TablePolicy
from .tables.table import Table

_TRIED = 2  # ranks of the trial of a split


class DerivedPolicy(TablePolicy):
    """Shard a transformers model that has no table.

    Args:
        model: the full model; may be on the meta device.
    """

    def __init__(self, model: Any) -> None:
        try:
            table = derived_table(model)
        except ValueError as error:
            reason = without_table(error, model.config.model_type, "tp_size at 1")
            table = Table(stage=(), divisible=(), tensor_errors=(reason,))
        super().__init__(table)
        self._full_model = model

    def stage_plan(self) -> StagePlan | None:  # type: ignore[override]
        """Return the plan that was derived from a small copy; without a pipeline the list of layers of the table."""
        if self._has_stages:
            return None if isinstance(self._derived, str) else self._derived
        return super().stage_plan() if isinstance(self.table.stage, StagePlan) else None

    def config_errors(self) -> list[str]:
        """List errors, with the reason if no stages were derived."""
        if self._has_stages and isinstance(self._derived, str):
            errors = self._tensor_errors() if self.shard_config.tensor_parallel_size > 1 else []
            return [*errors, self._derived]
        errors = super().config_errors()
        if self.shard_config.sequence_split is not None and not isinstance(self.table.stage, StagePlan):
            errors.append(
                f"sequence parallelism needs a table, and a {type(self._full_model).__name__} has none: leave "
                "enable_sequence_parallelism and sp_size out, or register a Table of its layers (docs/policies.md)"
            )
        return errors

    def _tensor_errors(self) -> list[str]:
        """List errors, with the departure of a split that was tried."""
        return super()._tensor_errors() or self._departures

    @cached_property
    def _departures(self) -> list[str]:
        """The error of the split, tried on two ranks with a small copy; empty if its numbers are right."""
        try:
            with apart():
                copy = in_double(copy_of(self._full_model))
                error = split_departure(copy, lambda model: TablePolicy(derived_table(model)), _TRIED)
        except ValueError as refused:
            error = f"it cannot be tried: {refused}"
        if error is None:
            return []
        kind = type(self._full_model).__name__
        return [
            f"transformers' plan of a {kind} does not give the numbers of one process: {error}. Leave tp_size at 1, or "
            "write a table (docs/policies.md)"
        ]

    @property
    def _has_stages(self) -> bool:
        """True if stages are asked for, and before it is known."""
        return "shard_config" not in vars(self) or self.shard_config.num_stages > 1

    @cached_property
    def _derived(self) -> StagePlan | str:
        """The plan of the full model, also for its copies and when it is cut; or the error."""
        try:
            return stage_plan_of(self._full_model)
        except ValueError as error:
            return (
                f"no pipeline stages of a {type(self._full_model).__name__} are known: {error}. Use pp_size=1, or "
                "write a table with its StagePlan (docs/policies.md)"
            )


def without_table(error: ValueError, model_type: str | None, options: str) -> str:
    """Return the error of a model without a table, for which none was derived; `options` are those to leave."""
    return (
        f"{error}, and model_type={model_type!r} has no table: leave {options}, register a Table of its layers "
        "(docs/policies.md), or give one as custom_policy"
    )
