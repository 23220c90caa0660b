"""Trainer on one process against echelon.Trainer: losses, norms, metrics, weights, checkpoints and resumed runs."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..log_lines import logged
from ..plugins.training import sequence
from ..pool import Pool
from ..slow import slow_row
from .runs import Run, differences, trained


class Tried(NamedTuple):
    """A layout: ranks, replicas, and options of the plugin."""

    world: int
    dp: int
    plugin: dict[str, Any]

    def train(self, pool: Pool, run: Run, **options: Any) -> dict[str, Any]:
        return pool.run(self.world, trained, run, self.plugin | options, self.dp, timeout=200)[0]


LAYOUTS = {
    "tp2": Tried(2, 1, dict(tp_size=2)),
    "pp2": Tried(2, 1, dict(pp_size=2, num_microbatches=4)),  # more than a last batch has samples
    "dp2 zero1": Tried(2, 2, dict(zero_stage=1, num_microbatches=2)),
    "tp2 pp2": Tried(4, 1, dict(tp_size=2, pp_size=2, num_microbatches=2)),
    "tp2 pp2 dp2 zero1": Tried(8, 2, dict(tp_size=2, pp_size=2, num_microbatches=2, zero_stage=1)),
    "ring_attn": Tried(2, 1, sequence("ring_attn", sp_size=2)),
    "all_to_all": Tried(2, 1, sequence("all_to_all", sp_size=2)),
    "split_gather": Tried(2, 1, sequence("split_gather", tp_size=2)),
    "wp2": Tried(2, 2, dict(wp_size=2)),
    "zero2": Tried(2, 2, dict(zero_stage=2)),
    "ep2": Tried(2, 2, dict(ep_size=2)),
    "tp2 ep2 dp2 zero1": Tried(4, 2, dict(tp_size=2, ep_size=2, zero_stage=1)),
    "pp2 without microbatches": Tried(2, 1, dict(pp_size=2, num_microbatches=1)),
}
USUAL = ("tp2", "pp2", "dp2 zero1", "tp2 pp2", "tp2 pp2 dp2 zero1")
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
    "numbers": COMMON | dict(num_train_epochs=1),
    "stream of numbers": COMMON | dict(max_steps=5, eval_strategy="no"),
    "other labels": COMMON | dict(num_train_epochs=1, remove_unused_columns=False, eval_strategy="no"),
    "penalty": COMMON | dict(num_train_epochs=1),
    "penalized loss function": COMMON | dict(num_train_epochs=1),
    "plain dataloader": COMMON,
    "grouped": COMMON | dict(train_sampling_strategy="group_by_length", num_train_epochs=1),
}


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Callable[[Any, Run], dict[str, Any]]:
    """Return the numbers of one process, which runs once for a name."""
    numbers: dict[Any, Any] = {}

    def of(name: Any, run: Run) -> dict[str, Any]:
        if name not in numbers:
            numbers[name] = pool.run(1, trained, run, None)[0]
        return deepcopy(numbers[name])

    return of


def run_of(kind: str, folder: Path) -> Run:
    native = {"label smoothing": "causal", "grouped": "causal"}.get(kind, kind)
    return Run(str(folder), kind=native, arguments=KINDS.get(kind, ONCE))


LAYOUTS_OF_KIND = {
    "causal": (*USUAL, "ring_attn", "all_to_all", "split_gather", "wp2", "zero2"),
    "bert": ("ring_attn", "all_to_all", "split_gather"),
    "experts": ("ep2", "pp2 without microbatches"),  # the auxiliary loss is one of microbatches
    "qwen3_moe": ("ep2", "tp2 ep2 dp2 zero1"),
    "masks": ("tp2", "pp2"),  # replicas draw other masks than one process
}
ROWS = [(kind, layout) for kind, layouts in LAYOUTS_OF_KIND.items() for layout in layouts]
ROWS += [(kind, layout) for kind in KINDS if kind != "causal" for layout in USUAL if layout != "tp2 pp2"]
QUICK = {*(("causal", layout) for layout in ("tp2", "pp2", "dp2 zero1")), ("qwen3_moe", "ep2")}


@pytest.mark.parametrize(("kind", "layout"), [row if row in QUICK else slow_row(*row) for row in ROWS])
def test_losses_norms_metrics_and_weights_are_those_of_one_process(
    pool: Pool, reference: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    one = reference(kind, run_of(kind, tmp_path / "one"))
    other = LAYOUTS[layout].train(pool, run_of(kind, tmp_path / "other"))
    assert differences(one, other, tolerance=TOLERANCE) == []
    if kind == "qwen3_moe":  # learns
        losses = [entry["loss"] for entry in one["history"] if "loss" in entry]
        assert losses[-1] < losses[0]


ONCE = COMMON | dict(num_train_epochs=1)
# Arguments that are honoured, several in a run, with the kind of the run.
HONOURED = {
    "data": (
        "causal",
        ONCE
        | dict(dataloader_drop_last=True, dataloader_pin_memory=True, data_seed=7, label_names=["labels"])
        | dict(remove_unused_columns=False, include_num_input_tokens_seen="non_padding")
        | dict(average_tokens_across_devices=False),
    ),
    "logging": (
        "causal",
        ONCE
        | dict(include_num_input_tokens_seen="all", logging_nan_inf_filter=False, logging_steps=2)
        | dict(logging_first_step=True, torch_empty_cache_steps=1, full_determinism=True)
        | dict(eval_on_start=True, prediction_loss_only=True),
    ),
    "optimizer": (
        "without metrics",
        ONCE
        | dict(optim="adafactor", learning_rate=1e-2, eval_do_concat_batches=False)
        | dict(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0})
        | dict(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False}),
    ),
    "plateau": (
        "causal",
        COMMON
        | dict(num_train_epochs=3, warmup_steps=0, lr_scheduler_type="reduce_lr_on_plateau")
        | dict(lr_scheduler_kwargs={"patience": 0, "threshold": 1.0}, save_strategy="best")
        | dict(metric_for_best_model="loss", save_total_limit=1),
    ),
    "metrics of inputs": (
        "metrics of inputs",
        ONCE | dict(include_for_metrics=["inputs", "loss"], eval_accumulation_steps=1),
    ),
    "metrics by batch": ("metrics by batch", ONCE | dict(batch_eval_metrics=True)),
    "answers": ("answers", ONCE | dict(learning_rate=1e-2)),
    "model_init": ("model_init", ONCE),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "dp2 zero1"])
@pytest.mark.parametrize("name", HONOURED)
def test_arguments_are_honoured_with_the_numbers_of_one_process(
    pool: Pool, reference: Any, tmp_path: Path, name: str, layout: str
) -> None:
    kind, arguments = HONOURED[name]
    run = Run(str(tmp_path / "one"), kind=kind, arguments=arguments, evaluates_first=True)
    one = reference(("arguments", name), run)
    other = LAYOUTS[layout].train(pool, replace(run, folder=str(tmp_path / "other")))
    assert differences(one, other, tolerance=TOLERANCE) == []


ADAM = dict(
    learning_rate=1e-2,
    adam_epsilon=1e-5,  # a smaller one makes steps of noise
    lr_scheduler_type="cosine",
    save_strategy="epoch",
    gradient_accumulation_steps=2,
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
    [("pp2", "dp2 zero1"), slow_row("dp2 zero1", "tp2"), slow_row("tp2 pp2", "tp2 pp2 dp2 zero1")],
)
def test_a_run_resumes_under_another_layout_with_the_numbers_of_one_process(
    pool: Pool, reference: Any, tmp_path: Path, first: str, second: str
) -> None:
    run = Run(str(tmp_path / "one"), arguments=ADAM)
    one, run = reference("resumed", run), replace(run, folder=str(tmp_path / "other"))
    other = LAYOUTS[first].train(pool, run)
    assert differences(one, other, tolerance=TOLERANCE) == []
    require_resumed(one, LAYOUTS[second].train(pool, replace(run, resume=f"{run.folder}/checkpoint-3")))


def require_resumed(one: dict[str, Any], other: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    for numbers in (one, other):
        del numbers["history"][-1]["train_loss"]  # of the steps of one call of train() alone
    assert differences(one, other, tolerance=tolerance) == []


def lines_of(run: Run) -> list[str]:
    with logged() as lines:
        trained(run, dict(zero_stage=1))
    return lines


def test_a_run_that_goes_on_without_optimizer_states_says_so(pool: Pool, tmp_path: Path) -> None:
    run = Run(str(tmp_path), arguments=ONCE | dict(save_strategy="epoch", save_only_model=True))
    assert pool.run(1, lines_of, run) == [[]]
    ((line,),) = pool.run(1, lines_of, replace(run, resume=str(next(tmp_path.glob("checkpoint-*")))))
    assert "has no optimizer, as those that save_only_model=True writes" in line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.parametrize("kind", ["causal", "adapters", "stream"])
@pytest.mark.parametrize(("first", "second"), [("pp2", "dp2 zero1"), ("dp2 zero1", "tp2"), ("tp2", "tp2")])
def test_a_run_resumes_in_the_middle_of_an_epoch(
    pool: Pool, reference: Any, tmp_path: Path, kind: str, first: str, second: str
) -> None:
    arguments = COMMON | dict(save_strategy="steps", save_steps=1)
    arguments |= dict(max_steps=6) if kind == "stream" else {}
    run = Run(str(tmp_path / "one"), kind=kind, arguments=arguments)
    one, run = reference(("middle", kind), run), replace(run, folder=str(tmp_path / "other"))
    LAYOUTS[first].train(pool, run)
    resumed = replace(run, resume=f"{run.folder}/checkpoint-2")  # of 3 in an epoch
    require_resumed(one, LAYOUTS[second].train(pool, resumed))


@pytest.mark.slow
@pytest.mark.parametrize("layout", USUAL)
def test_the_best_checkpoint_is_that_of_one_process(
    pool: Pool, reference: Any, tmp_path: Path, layout: str
) -> None:
    run = Run(str(tmp_path / "one"), arguments=BEST, predicts=True, early_stopping=True)
    one = reference("best", run)
    assert one["best"] is not None
    other = LAYOUTS[layout].train(pool, replace(run, folder=str(tmp_path / "other")))
    assert differences(one, other, tolerance=TOLERANCE) == []
