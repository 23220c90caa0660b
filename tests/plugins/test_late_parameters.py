"""`overlap_allgather` of the plugins: the same losses, a step that does not wait."""

from typing import Any

import pytest

from ..pool import Pool
from . import training


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("hybrid", {"tp_size": 2, "zero_stage": 1}),
        ("hybrid", {"pp_size": 2, "zero_stage": 2, "pp_style": "zbv"}),
        ("zero", {"stage": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_losses_are_those_of_parameters_that_arrive_at_once(
    pool: Pool, kind: str, settings: dict[str, Any]
) -> None:
    plain, late = (
        pool.run(4, training.train, kind, settings | {"overlap_allgather": overlaps}, training.LLAMA)
        for overlaps in (False, True)
    )
    assert late == plain


def refuse(settings: dict[str, Any]) -> str:
    return training.refused(lambda: training.hybrid(**settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"overlap_allgather": "yes", "zero_stage": 1}, "overlap_allgather='yes' must be True or False"),
        ({"overlap_allgather": True}, "use zero_stage 1 or 2, or leave it out"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(pool: Pool, settings: dict[str, Any], told: str) -> None:
    assert pool.run(1, refuse, settings)[0].endswith(told)
