"""Trainer on one process against echelon.Trainer: losses, norms, metrics, weights, checkpoints and resumed runs."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..log_lines import logged
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
    "numbers": COMMON | dict(num_train_epochs=1),
    "stream of numbers": COMMON | dict(max_steps=5, eval_strategy="no"),
    "other labels": COMMON | dict(num_train_epochs=1, remove_unused_columns=False, eval_strategy="no"),
    "penalty": COMMON | dict(num_train_epochs=1),
    "penalized loss function": COMMON | dict(num_train_epochs=1),
    "plain dataloader": COMMON,
    "grouped": COMMON | dict(train_sampling_strategy="group_by_length", num_train_epochs=1),
}


def run_of(kind: str, folder: Path, **others: Any) -> Run:
    native = {"label smoothing": "causal", "grouped": "causal"}.get(kind, kind)
    return Run(folder=str(folder), kind=native, arguments=KINDS.get(kind, ONCE), **others)


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


def compared(pool: Pool, references: dict[str, Any], tmp_path: Path, kind: str, layout: str) -> list[str]:
    if kind not in references:
        references[kind] = pool.run(1, trained, run_of(kind, tmp_path / "one"), None)[0]
    tried = (LAYOUTS | OTHER_LAYOUTS)[layout]
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


SEQUENCE = dict(enable_sequence_parallelism=True)
OTHER_LAYOUTS = {
    "ring_attn": Tried(2, 1, dict(sp_size=2, sequence_parallelism_mode="ring_attn", **SEQUENCE)),
    "all_to_all": Tried(2, 1, dict(sp_size=2, sequence_parallelism_mode="all_to_all", **SEQUENCE)),
    "split_gather": Tried(2, 1, dict(tp_size=2, sequence_parallelism_mode="split_gather", **SEQUENCE)),
    "wp2": Tried(2, 2, dict(wp_size=2)),
    "zero2": Tried(2, 2, dict(zero_stage=2)),
    "ep2": Tried(2, 2, dict(ep_size=2)),
    "tp2 ep2 dp2 zero1": Tried(4, 2, dict(tp_size=2, ep_size=2, zero_stage=1)),
    "pp2 without microbatches": Tried(2, 1, dict(pp_size=2, num_microbatches=1)),
}
LAYOUTS_OF_KIND = {
    "causal": ["ring_attn", "all_to_all", "split_gather", "wp2", "zero2"],
    "bert": ["ring_attn", "all_to_all", "split_gather"],
    "experts": ["ep2", "pp2 without microbatches"],  # the auxiliary loss is one of microbatches
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind, layouts in LAYOUTS_OF_KIND.items() for layout in layouts]
)
def test_sequences_weights_and_experts_are_sharded_with_the_numbers_of_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, kind: str, layout: str
) -> None:
    assert compared(pool, references, tmp_path, kind, layout) == []


@pytest.mark.parametrize("layout", ["ep2", pytest.param("tp2 ep2 dp2 zero1", marks=pytest.mark.slow)])
def test_a_mixture_trains_with_its_router_loss_under_tp_and_ep_as_in_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    assert compared(pool, references, tmp_path, "qwen3_moe", layout) == []
    losses = [entry["loss"] for entry in references["qwen3_moe"]["history"] if "loss" in entry]
    assert losses[-1] < losses[0]


ONCE = COMMON | dict(num_train_epochs=1)
# Arguments that are honoured, several in a run, with the kind of the run.
HONOURED = {
    "data": (
        "causal",
        ONCE
        | dict(
            dataloader_drop_last=True,
            dataloader_pin_memory=True,
            data_seed=7,
            remove_unused_columns=False,
            label_names=["labels"],
            include_num_input_tokens_seen="non_padding",
            average_tokens_across_devices=False,
        ),
    ),
    "logging": (
        "causal",
        ONCE
        | dict(
            include_num_input_tokens_seen="all",
            logging_nan_inf_filter=False,
            logging_steps=2,
            logging_first_step=True,
            torch_empty_cache_steps=1,
            full_determinism=True,
            eval_on_start=True,
            prediction_loss_only=True,
        ),
    ),
    "optimizer": (
        "without metrics",
        ONCE
        | dict(
            optim="adafactor",
            learning_rate=1e-2,
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"power": 2.0},
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
            eval_do_concat_batches=False,
        ),
    ),
    "plateau": (
        "causal",
        COMMON
        | dict(
            num_train_epochs=3,
            warmup_steps=0,
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0, "threshold": 1.0},
            save_strategy="best",
            metric_for_best_model="loss",
            save_total_limit=1,
        ),
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
@pytest.mark.parametrize("name", list(HONOURED))
def test_arguments_are_honoured_with_the_numbers_of_one_process(
    pool: Pool, references: dict[str, Any], tmp_path: Path, name: str, layout: str
) -> None:
    kind, arguments = HONOURED[name]
    run = Run(str(tmp_path / "one"), kind=kind, arguments=arguments, evaluates_first=True)
    if name not in references:
        references[name] = pool.run(1, trained, run, None)[0]
    tried, run = LAYOUTS[layout], replace(run, folder=str(tmp_path / "other"))
    other = pool.run(tried.world, trained, run, tried.plugin, tried.dp, timeout=200)[0]
    assert differences(references[name], other, tolerance=TOLERANCE) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])  # replicas draw other masks than one process
def test_ranks_of_a_replica_draw_one_mask(
    pool: Pool, references: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    assert compared(pool, references, tmp_path, "masks", layout) == []


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
    pool: Pool, references: dict[str, Any], tmp_path: Path, kind: str, first: str, second: str
) -> None:
    arguments = COMMON | dict(save_strategy="steps", save_steps=1)
    arguments |= dict(max_steps=6) if kind == "stream" else {}
    run = Run(str(tmp_path / "one"), kind=kind, arguments=arguments)
    if ("middle", kind) not in references:
        references["middle", kind] = pool.run(1, trained, run, None)[0]
    one = deepcopy(references["middle", kind])
    begun, continued = LAYOUTS[first], LAYOUTS[second]
    run = replace(run, folder=str(tmp_path / "other"))
    pool.run(begun.world, trained, run, begun.plugin, begun.dp, timeout=200)
    resumed = replace(run, resume=str(tmp_path / "other" / "checkpoint-2"))  # of 3 in an epoch
    other = pool.run(continued.world, trained, resumed, continued.plugin, continued.dp, timeout=200)[0]
    for run_of_steps in (one, other):
        del run_of_steps["history"][-1]["train_loss"]
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
