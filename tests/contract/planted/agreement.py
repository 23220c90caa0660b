"""Faults in what ranks must agree on in a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ...plugins.test_step_agreement import depart
from ..mutations import Mutation

LLAMA = ModelChoice(model_type="llama", num_layers=2)
NORM = "echelon.zero.clipping:norm_over_all_ranks"


def departing_batch() -> str | None:
    """A batch that departs in a warm step is named, and nothing is changed by it."""
    error, is_unchanged = depart("batch", {"tp_size": 2})
    return None if "rank(s) [1]" in error and is_unchanged else f"not named: {error or 'no error'}"


def agreed(share: property) -> property:
    return property(lambda self: 0.0)


def first_rank_unweighted(share: property) -> property:
    """The codes of a replica add up to more than 0, though its ranks agree."""
    return property(lambda self: float(self._batch))


def without_shares(norm: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_measured, norm)


def _measured(norm: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return norm(*args, **{**kwargs, "share": 0.0})


FAULTS = {
    "the codes of a batch are not counted": Mutation(
        target="echelon.cluster.step_agreement:StepAgreement.share",
        wrapper=agreed,
        check=departing_batch,
        notice="^not named: ",
    ),
    "the code of a replica's first rank is not subtracted": Mutation(
        target="echelon.cluster.step_agreement:StepAgreement.share",
        wrapper=first_rank_unweighted,
        row=(LLAMA, Layout(tp=2)),
        num_steps=5,
        notice="AssertionError: sums of codes differ",
    ),
    "the codes of batches do not travel with the norm": Mutation(
        target=NORM,
        wrapper=without_shares,
        check=departing_batch,
        notice="^not named: ",
        quick=True,
    ),
}
