"""Random layouts, models and features give what a plain loop gives; every saved tensor is compared."""

import os
from datetime import date
from pathlib import Path
from unittest.mock import patch

import pytest

from ..pool import Pool
from .draw import OPTIMIZERS, Draw, Layout, draw
from .runs import checked, reproduction

SEED = int(os.environ.get("FUZZ_SEED", date.today().strftime("%Y%m%d")))
DRAWS = int(os.environ.get("FUZZ_DRAWS", "40"))
QUICK_SEED = 7


def check(pool: Pool, drawn: Draw, folder: Path) -> None:
    try:
        lines = checked(drawn, pool.run, folder)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n\n{reproduction(drawn)}") from error
    assert not lines, "\n".join([*lines, "", reproduction(drawn)])


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_few_draws_train_as_a_plain_loop_does(pool: Pool, number: int, tmp_path: Path) -> None:
    check(pool, draw(QUICK_SEED, number), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(DRAWS), ids=lambda number: f"{SEED}-{number}")
def test_the_draws_of_the_day_train_as_a_plain_loop_does(pool: Pool, number: int, tmp_path: Path) -> None:
    check(pool, draw(SEED, number), tmp_path)


@pytest.mark.slow
def test_another_weight_decay_departs_with_the_lines_that_reproduce_it(pool: Pool, tmp_path: Path) -> None:
    drawn = next(
        candidate for number in range(99) if (candidate := draw(QUICK_SEED, number)).optimizer == "AdamW"
    )
    # In this process alone, where the plain loop runs: the workers import the module themselves.
    with patch.dict(OPTIMIZERS["AdamW"], weight_decay=0.2), pytest.raises(AssertionError) as caught:
        check(pool, drawn, tmp_path)
    assert "off by" in str(caught.value)
    assert repr(drawn) in str(caught.value)
    assert eval(repr(drawn), {"Draw": Draw, "Layout": Layout}) == drawn
