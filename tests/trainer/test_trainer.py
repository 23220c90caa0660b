"""Trainer on one process against echelon.Trainer: losses, norms, metrics, weights, checkpoints and resumed runs."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..pool import Pool
from .runs import Run, differences, trained


class Tried(NamedTuple):
    world: int
    dp: int
    plugin: dict[str, Any]


LAYOUTS = {
    "tp2": Tried(2, 1, dict(tp_size=2)),
    "pp2": Tried(2, 1, dict(pp_size=2, num_microbatches=4)),  # more than a last batch has samples
    "dp2 zero1": Tried(2, 2, dict(zero_stage=1, num_microbatches=2)),
    "tp2 pp2": Tried(4, 1, dict(tp_size=2, pp_size=2, num_microbatches=2)),
    "tp2 pp2 dp2 zero1": Tried(8, 2, dict(tp_size=2, pp_size=2, num_microbatches=2, zero_stage=1)),
}
SLOW = ("tp2 pp2", "tp2 pp2 dp2 zero1")
# Sums in another order: float32 has 1e-7, and a step multiplies it by the learning rate.
TOLERANCE = 1e-5
COMMON = dict(
    learning_rate=0.1, optim="sgd", max_grad_norm=0.3, warmup_steps=2, gradient_accumulation_steps=2
)
KINDS = {
    "causal": COMMON,
    "bert": dict(learning_rate=1e-3, gradient_accumulation_steps=2, num_train_epochs=1),
    "label smoothing": COMMON | dict(label_smoothing_factor=0.1, num_train_epochs=1),
    "loss function": COMMON | dict(num_train_epochs=1),
    "compute_loss": COMMON | dict(num_train_epochs=1),
    "stream": COMMON | dict(max_steps=5),
    "grouped": COMMON | dict(train_sampling_strategy="group_by_length", num_train_epochs=1),
}


def run_of(kind: str, folder: Path, **others: Any) -> Run:
    native = {"label smoothing": "causal", "grouped": "causal"}.get(kind, kind)
    return Run(folder=str(folder), kind=native, arguments=KINDS[kind], **others)


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


def compared(pool: Pool, references: dict[str, Any], tmp_path: Path, kind: str, layout: str) -> list[str]:
    if kind not in references:
        references[kind] = pool.run(1, trained, run_of(kind, tmp_path / "one"), None)[0]
    tried = LAYOUTS[layout]
    (other, *_) = pool.run(
        tried.world, trained, run_of(kind, tmp_path / "other"), tried.plugin, tried.dp, timeout=200
    )
    return differences(references[kind], other, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LAYOUTS]
)
def test_losses_norms_metrics_and_weights_are_those_of_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    assert compared(pool, references, tmp_path, "causal", layout) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2 zero1", "tp2 pp2 dp2 zero1"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "causal"])
def test_every_kind_of_loss_and_data_is_that_of_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, kind: str, layout: str
) -> None:
    assert compared(pool, references, tmp_path, kind, layout) == []


ADAM = dict(
    learning_rate=1e-2, lr_scheduler_type="cosine", save_strategy="epoch", gradient_accumulation_steps=2
)
BEST = ADAM | dict(
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    save_total_limit=1,
    num_train_epochs=4,
    learning_rate=3e-3,
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("pp2", "dp2 zero1"),
        pytest.param("dp2 zero1", "tp2", marks=pytest.mark.slow),
        pytest.param("tp2 pp2", "tp2 pp2 dp2 zero1", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_under_another_layout_with_the_numbers_of_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, first: str, second: str
) -> None:
    if "resumed" not in references:
        references["resumed"] = pool.run(1, trained, Run(str(tmp_path / "one"), arguments=ADAM), None)[0]
    one = deepcopy(references["resumed"])
    begun, continued = LAYOUTS[first], LAYOUTS[second]
    run = Run(str(tmp_path / "other"), arguments=ADAM)
    other = pool.run(begun.world, trained, run, begun.plugin, begun.dp, timeout=200)[0]
    assert differences(one, other, tolerance=TOLERANCE) == []
    resumed = replace(run, resume=str(tmp_path / "other" / "checkpoint-3"))
    other = pool.run(continued.world, trained, resumed, continued.plugin, continued.dp, timeout=200)[0]
    for run_of_steps in (one, other):
        del run_of_steps["history"][-1]["train_loss"]  # of the steps of one call of train() alone
    assert differences(one, other, tolerance=TOLERANCE) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_best_checkpoint_is_that_of_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    run = Run(str(tmp_path / "one"), arguments=BEST, predicts=True, early_stopping=True)
    if "best" not in references:
        references["best"] = pool.run(1, trained, run, None)[0]
    tried = LAYOUTS[layout]
    run = replace(run, folder=str(tmp_path / "other"))
    other = pool.run(tried.world, trained, run, tried.plugin, tried.dp, timeout=200)[0]
    assert references["best"]["best"] is not None
    assert differences(references["best"], other, tolerance=TOLERANCE) == []
