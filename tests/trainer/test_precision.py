"""Trainer in 16 bits: as near to float32 as transformers' own, and steps that overflow are skipped as it skips them."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from ..pool import Pool
from ..slow import slow_row
from .runs import Run, differences, trained
from .test_trainer import COMMON, LAYOUTS, require_resumed

# Saved weights are those of the model, in 16 bits: 8 bits of mantissa.
ROUNDING = 2**-8


def distance(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> float:
    """Return the largest distance of a logged number."""
    pairs = zip(one["history"], other["history"], strict=True)
    return max(abs(a[name] - b[name]) for a, b in pairs if name in a)


@pytest.mark.slow
def test_bf16_is_as_near_to_float32_as_transformers_own(pool: Pool, tmp_path: Path) -> None:
    run = Run(str(tmp_path / "one"), arguments=COMMON | dict(learning_rate=0.05))
    one = pool.run(1, trained, run, None)[0]
    run = replace(run, folder=str(tmp_path / "bf16"), arguments={**run.arguments, "bf16": True})
    native = pool.run(1, trained, run, None)[0]
    for layout in ("tp2", "pp2", "dp2 zero1"):
        other = LAYOUTS[layout].train(pool, replace(run, folder=str(tmp_path / layout)))
        for name in ("loss", "grad_norm", "eval_loss"):
            assert distance(one, other, name) <= 2 * distance(one, native, name), (layout, name)
        assert differences({**one, "history": []}, {**other, "history": []}, tolerance=ROUNDING) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_16_bits_resumes_with_its_master_weights(pool: Pool, tmp_path: Path, precision: str) -> None:
    arguments = COMMON | {precision: True, "save_strategy": "steps", "save_steps": 1}
    run, tried = Run(str(tmp_path), arguments=arguments), LAYOUTS["dp2 zero1"]
    scale = dict(initial_scale=2.0**21) if precision == "fp16" else {}
    one = tried.train(pool, run, **scale)
    other = tried.train(pool, replace(run, resume=f"{tmp_path}/checkpoint-4"), **scale)
    for entry in (*one["history"], *other["history"]):
        if not isfinite(entry.get("grad_norm", 0)):
            entry["grad_norm"] = 0
    require_resumed(one, other, tolerance=0)


@pytest.mark.parametrize("layout", ["pp2", slow_row("tp2")])
def test_a_step_that_overflows_in_fp16_is_logged_and_counts_but_the_schedule_waits(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    arguments = COMMON | dict(fp16=True, warmup_steps=0)
    run = LAYOUTS[layout].train(pool, Run(str(tmp_path), arguments=arguments), initial_scale=2.0**21)
    steps = [entry for entry in run["history"] if "loss" in entry]
    is_taken = [isfinite(step["grad_norm"]) for step in steps]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6] and 1 <= is_taken.count(False) <= 4
    rates = [0.1 * (6 - is_taken[:number].count(True)) / 6 for number in range(6)]
    assert [step["learning_rate"] for step in steps] == pytest.approx(rates)
