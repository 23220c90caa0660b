"""Optimizers that need full parameters update them as one process does, bit for bit, under every layout."""

import pytest

from ..pool import Pool
from ..slow import slow_row
from .owners import OPTIMIZERS, Run, reference

STEPS = range(1, 4)


def follow(sizes: dict[str, int], stages: tuple[int, ...]) -> None:
    for name, make in OPTIMIZERS.items():
        for stage in stages:
            run = Run(sizes, stage, make)
            for step in STEPS:
                run.step(step)
            try:
                run.require(reference(make, run.mesh.size("data"), STEPS))
            except AssertionError as error:
                raise AssertionError(f"{name} at stage {stage}: {error}") from error


@pytest.mark.parametrize(
    ("ranks", "sizes", "stages"),
    [
        slow_row(1, {}, (0, 1)),
        slow_row(2, {}, (0, 1, 2)),
        slow_row(2, {"tp": 2}, (0, 1)),
        slow_row(2, {"ep": 2}, (0, 1)),
        slow_row(2, {}, (0, 2)),
        slow_row(4, {"tp": 2}, (0, 2)),
        slow_row(4, {"tp": 2}, (1,)),
        slow_row(4, {"zero": 2}, (1, 2)),
        (4, {"tp": 2, "ep": 2, "zero": 1}, (1,)),
    ],
)
def test_updates_equal_those_of_one_process(
    pool: Pool, ranks: int, sizes: dict[str, int], stages: tuple[int, ...]
) -> None:
    pool.run(ranks, follow, sizes, stages)
