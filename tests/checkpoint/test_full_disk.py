"""A disk that is full, or a rank that dies, ends neither training nor what was saved before."""

from pathlib import Path

import pytest

from ..pool import Pool, RankDied
from . import full_disks


@pytest.mark.parametrize(("where", "use_async"), [pytest.param(0, False, marks=pytest.mark.slow), (1, True)])
def test_a_full_disk_is_told_and_training_goes_on(
    pool: Pool, tmp_path: Path, where: int, use_async: bool
) -> None:
    pool.run(2, full_disks.files_too_large, tmp_path, where, use_async)


@pytest.mark.slow
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_a_disk_that_is_full_at_any_call(pool: Pool, tmp_path: Path, where: int, use_async: bool) -> None:
    calls = pool.run(2, full_disks.full_at_every_call, tmp_path, where, use_async, timeout=250)[0]
    assert calls >= (30 if where == 0 else 10)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_rank_that_dies_while_saving_is_noticed(pool: Pool, tmp_path: Path, number: int) -> None:
    first, second = pool.run_failing(2, full_disks.rank_dies_while_saving, tmp_path, number)
    assert first is None and isinstance(second, RankDied)
    assert pool.run(2, full_disks.still_there, tmp_path) == [1, 1]
