"""Damage is found wherever it is and named, and an older checkpoint is gone on from."""

from pathlib import Path

import pytest

from ..pool import Pool
from . import harm


def test_one_flipped_bit_is_named_with_file_and_tensor(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, harm.flip_every_file, tmp_path, 1)[0] >= 14


@pytest.mark.slow
def test_what_is_missing_cut_or_of_another_format_is_passed_over(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, harm.whole_harms, tmp_path)


@pytest.mark.slow
def test_a_flipped_bit_is_named_wherever_it_is(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, harm.flip_every_file, tmp_path, 60, timeout=250)[0] >= 500
