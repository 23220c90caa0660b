"""A run that looks for a checkpoint and finds none says so, or does not begin."""

from pathlib import Path
from typing import Any

import pytest

from echelon.verify.models import ModelChoice

from ..plugins.training import hybrid
from ..pool import Pool
from .failures import logged

LLAMA = ModelChoice(model_type="llama", num_layers=2)


def look_for_none(folder: Path) -> dict[str, Any]:
    booster = hybrid()
    model = LLAMA.build()
    boosted, *_ = booster.boost(model)
    with logged("echelon.checkpoint") as lines:
        found: dict[str, Any] = {
            "auto": [booster.load_checkpoint(each, model=boosted) for each in (folder, folder / "typo")]
        }
    found["lines"] = lines
    with pytest.raises(FileNotFoundError) as error:
        booster.load_checkpoint(folder, model=boosted, resume="must")
    found["must"] = str(error.value)
    booster.save_checkpoint(folder, 2, model=boosted).wait()
    resumed = booster.load_checkpoint(folder, model=boosted, resume="must")
    assert resumed is not None and resumed.step == 2
    return found


def test_a_run_that_finds_no_checkpoint_says_so_on_one_rank_or_must_not_begin(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(2, look_for_none, tmp_path)
    assert first["auto"] == second["auto"] == [None, None]
    has_none, is_missing = first["lines"]
    assert has_none.startswith(
        f"no checkpoint in {tmp_path}, which has no folder step-…: the run begins anew"
    )
    assert is_missing.startswith(
        f"no checkpoint in {tmp_path / 'typo'}, which does not exist: the run begins anew"
    )
    assert second["lines"] == []
    assert first["must"] == second["must"]
    assert (
        f"no checkpoint in {tmp_path}" in first["must"] and 'or resume="auto" to begin anew' in first["must"]
    )
