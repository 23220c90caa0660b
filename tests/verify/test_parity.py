"""Parity of every layout with one process."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import T5Config

from echelon.verify.batch import make_batch
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import Report, parity

from ..pool import Pool

MODELS = {
    "bert-classification": ModelChoice(model_type="bert", head="classification"),
    "bert-masked": ModelChoice(model_type="bert", head="masked"),
    "bert-masked-tied": ModelChoice(model_type="bert", head="masked", tied=True),
    "gpt2": ModelChoice(model_type="gpt2"),
    "gpt2-tied": ModelChoice(model_type="gpt2", tied=True),
    "llama": ModelChoice(model_type="llama"),
    "llama-tied": ModelChoice(model_type="llama", tied=True),
}
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=4),
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=1),
    Layout(tp=2, dp=2, zero=1),
    Layout(pp=2, dp=2, zero=1),
    Layout(tp=2, pp=2, dp=2, zero=1),
]


def check(pool: Pool, choice: ModelChoice, layout: Layout, **kwargs: object) -> Report:
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0, **kwargs)
    assert len({report.departure for report in reports}) == 1, "ranks disagree on the verdict"
    return reports[0]


# A third of them is quick, with every model and every layout in it.
EIGHT = [
    pytest.param(model, layout, id=f"{model}-{layout}", marks=[pytest.mark.slow] * ((number + place) % 3 > 0))
    for number, model in enumerate(MODELS)
    for place, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("model", "layout"), EIGHT)
def test_layout_trains_as_one_process_does(pool: Pool, model: str, layout: Layout) -> None:
    assert check(pool, MODELS[model], layout).departure is None


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_the_llama_family_trains_also_with_fewer_key_value_heads_than_ranks(
    pool: Pool, model_type: str
) -> None:
    assert check(pool, ModelChoice(model_type=model_type), Layout(tp=4)).departure is None


T5 = ModelChoice(model_type="t5", num_layers=2)
T5_CASES = {
    "t5": (T5, Layout(tp=2)),
    "t5 over four": (T5, Layout(tp=4)),
    # Smooth: of a relu, one unit that switches by a rounding makes the gradients jump.
    "t5 tied": (
        replace(T5, tied=True, settings=(("feed_forward_proj", "gated-gelu"),)),
        Layout(tp=2, dp=2, zero=1),
    ),
    "t5 replicated": (T5, Layout(dp=2, zero=1)),
    "t5 bf16": (replace(T5, tied=True), Layout(tp=2, precision="bf16")),
    "t5 replicated bf16": (T5, Layout(dp=2, zero=1, precision="bf16")),
    "mt5": (ModelChoice(model_type="mt5", num_layers=2), Layout(tp=2)),
    "umt5": (ModelChoice(model_type="umt5", tied=True, num_layers=2), Layout(tp=2)),
}


@pytest.mark.parametrize("case", T5_CASES)
def test_an_encoder_decoder_trains_as_one_process_does(pool: Pool, case: str) -> None:
    choice, layout = T5_CASES[case]
    assert check(pool, choice, layout).departure is None


def test_a_batch_of_an_encoder_decoder_has_two_lengths_and_an_untied_head_its_own_weight() -> None:
    choice = ModelChoice(model_type="t5", num_layers=1)
    batch = make_batch(choice, num_samples=7, seed=0)
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((7, 13), (7, 9))
    assert (batch["labels"] == -100).any()
    assert (batch["attention_mask"] == 0).any()
    model = choice.build()
    assert (len(model.encoder.block), len(model.decoder.block)) == (1, 1)
    assert model.lm_head.weight is not model.shared.weight
    tied = ModelChoice(model_type="t5", tied=True, num_layers=1).build()
    assert tied.lm_head.weight is tied.shared.weight
    assert tied.config.scale_decoder_outputs
    # Older releases of transformers scale before an untied head too.
    untied = T5Config(tie_word_embeddings=False)
    assert model.config.scale_decoder_outputs == untied.scale_decoder_outputs


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(tp=2, pp=2, precision="bf16")),
        ("gpt2-tied", Layout(tp=2, dp=2, zero=1, precision="bf16")),
        ("bert-classification", Layout(pp=2, dp=2, zero=1, precision="fp16")),
        ("llama-tied", Layout(tp=2, pp=2, precision="fp16")),
    ],
    ids=str,
)
def test_16_bit_layouts_are_as_near_to_float32_as_one_process(pool: Pool, model: str, layout: Layout) -> None:
    assert check(pool, MODELS[model], layout).departure is None


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, schedule="gpipe"),
        Layout(pp=4, microbatches=2),
        Layout(pp=2, microbatches=1),
        Layout(tp=2, dp=2, zero=0, max_norm=0.1),
        Layout(pp=2, dp=2, zero=1, max_norm=0.1),
    ],
    ids=lambda layout: f"{layout}-{layout.schedule}-{layout.microbatches}-{layout.max_norm}",
)
def test_other_schedules_microbatch_counts_and_clipping_agree(pool: Pool, layout: Layout) -> None:
    assert check(pool, MODELS["llama-tied"], layout).departure is None


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "gpipe×2": {"schedule": "gpipe", "chunks": 2},
    "interleaved": {"schedule": "interleaved"},
    "interleaved×2": {"schedule": "interleaved", "chunks": 2},
    "zbh1": {"schedule": "zbh1"},
    "zbv": {"schedule": "zbv"},
}
# Interleaved with one chunk is 1F1B's order, and that is quick below and beside other axes.
SLOW_SCHEDULES = ("1f1b", "interleaved")
SCHEDULE_CASES = [
    (model, schedule, pp, () if is_quick else pytest.mark.slow)
    for model in ("llama", "gpt2", "bert-classification")
    for schedule in SCHEDULES
    for pp in (2, 4)
    for is_quick in [
        (model == "llama") == (pp == 2) and model != "bert-classification" and schedule not in SLOW_SCHEDULES
    ]
]


@pytest.mark.parametrize(
    ("model", "schedule", "pp"),
    [pytest.param(model, schedule, pp, marks=marks) for model, schedule, pp, marks in SCHEDULE_CASES],
)
def test_every_schedule_gives_equal_bits(pool: Pool, model: str, schedule: str, pp: int) -> None:
    choice = replace(MODELS[model], num_layers=9)
    report = check(pool, choice, Layout(pp=pp, microbatches=5, **SCHEDULES[schedule]))
    assert report.departure is None
    assert report.steps[0].measure("gradient").distance == 0.0
    assert report.steps[0].measure("loss").distance == 0.0


TIED = {
    "t5": ModelChoice(model_type="t5"),
    "t5-tied": ModelChoice(model_type="t5", tied=True),
    "gpt2-tied": MODELS["gpt2-tied"],
    "bert-masked-tied": MODELS["bert-masked-tied"],
}
TIED_CASES = [
    (model, schedule, pp, () if is_quick else pytest.mark.slow)
    for model in TIED
    for schedule in SCHEDULES
    for pp in (2, 4)
    for is_quick in [(model, pp) in (("t5", 4), ("t5-tied", 2)) and schedule != "interleaved"]
]


@pytest.mark.parametrize(
    ("model", "schedule", "pp"),
    [pytest.param(model, schedule, pp, marks=marks) for model, schedule, pp, marks in TIED_CASES],
)
def test_every_schedule_sums_what_stages_share(pool: Pool, model: str, schedule: str, pp: int) -> None:
    choice = TIED[model] if model.startswith("t5") else replace(TIED[model], num_layers=9)
    layout = Layout(pp=pp, microbatches=5, **SCHEDULES[schedule])
    report = check(pool, choice, layout)
    assert report.departure is None
    # What several stages hold is added up in another order.
    assert report.steps[0].measure("gradient").distance <= 1e-6
    assert report.steps[0].measure("loss").distance <= 1e-6 * report.steps[0].reference_loss


BESIDE_CASES = [
    (model, sizes, schedule, pp, () if is_quick else pytest.mark.slow)
    for model in ("llama-tied", "t5", "gpt2", "bert")
    for sizes in ({"tp": 2}, {"dp": 2, "zero": 1})
    for schedule in SCHEDULES
    for pp in (2, 4)
    for is_quick in [(model, pp) == ("llama-tied", 2) and schedule not in SLOW_SCHEDULES]
]


@pytest.mark.parametrize(
    ("model", "sizes", "schedule", "pp"),
    [
        pytest.param(*case, id=f"{case[0]}-{'·'.join(case[1])}-{case[2]}-{case[3]}", marks=marks)
        for *case, marks in BESIDE_CASES
    ],
)
def test_every_schedule_agrees_beside_tensor_parallelism_and_zero(
    pool: Pool, model: str, sizes: dict[str, int], schedule: str, pp: int
) -> None:
    choice = MODELS.get(model) or ModelChoice(model_type=model)
    if model != "t5":  # whose encoder and decoder have four each
        choice = replace(choice, num_layers=2 * pp + 1)
    report = check(pool, choice, Layout(pp=pp, microbatches=4, **sizes, **SCHEDULES[schedule]))
    assert report.departure is None


STAGE_TWO = [
    ("llama", Layout(dp=2, zero=2)),
    ("llama-tied", Layout(dp=4, zero=2, max_norm=0.1)),
    ("gpt2-tied", Layout(tp=2, dp=2, zero=2)),
    ("qwen3", Layout(tp=2, dp=2, zero=2, precision="bf16")),
    ("bert-masked-tied", Layout(pp=2, dp=2, zero=2, microbatches=4)),
    ("llama-tied", Layout(pp=2, dp=2, zero=2, microbatches=4, schedule="interleaved", chunks=2)),
    ("llama", Layout(pp=2, dp=2, zero=2, microbatches=4, schedule="zbh1", precision="bf16")),
    ("gpt2-tied", Layout(pp=2, dp=2, zero=2, microbatches=4, schedule="zbv")),
    ("t5-tied", Layout(pp=2, dp=2, zero=2, microbatches=4, precision="fp16")),
    ("llama", Layout(dp=2, zero=2, recompute=1.0)),
    ("gpt2", Layout(dp=4, zero=1, zero_size=2, precision="bf16", max_norm=0.1)),
    ("llama-tied", Layout(dp=4, zero=2, zero_size=2)),
    ("llama", Layout(dp=2, zero=1, zero_size=1)),
    ("gpt2-tied", Layout(dp=2, zero=1, overlap_allgather=True)),
    ("t5-tied", Layout(pp=2, dp=2, zero=2, microbatches=4, overlap_allgather=True, precision="bf16")),
    ("bert-masked-tied", Layout(tp=2, dp=2, zero=1, overlap_allgather=True)),
    ("llama-tied", Layout(dp=4, zero=2, zero_size=2, overlap_allgather=True, max_norm=0.1, precision="fp16")),
]


# Cases that add a model to what a quick one has of schedule, precision and axes.
SLOW_STAGE_TWO = ("gpt2-tied·tp2·dp2", "llama-tied·pp2·dp2", "llama·dp2·zero1")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            model,
            layout,
            marks=[pytest.mark.slow] * f"{model}·{layout}".startswith(SLOW_STAGE_TWO),
            id=f"{model}·{layout}",
        )
        for model, layout in STAGE_TWO
    ],
)
def test_gradients_that_no_rank_holds_whole_are_the_same(pool: Pool, model: str, layout: Layout) -> None:
    choice = {**MODELS, **TIED}.get(model) or ModelChoice(model_type=model)
    if layout.schedule in ("interleaved", "zbv"):
        choice = replace(choice, num_layers=5)
    assert check(pool, choice, layout).departure is None


RECOMPUTING = [
    ("llama", Layout(pp=2, recompute=0.5, schedule="zbv", microbatches=4)),
    ("bert-masked", Layout(tp=2, pp=2, recompute=1.0)),
    ("gpt2-tied", Layout(tp=2, dp=2, zero=1, recompute=0.5)),
    ("llama", Layout(tp=2, pp=2, recompute=1.0, schedule="zbh1", precision="bf16")),
]


@pytest.mark.parametrize(("model", "layout"), RECOMPUTING, ids=str)
def test_recomputed_layers_agree(pool: Pool, model: str, layout: Layout) -> None:
    assert check(pool, MODELS[model], layout).departure is None


def test_uneven_layers_agree(pool: Pool) -> None:
    choice = ModelChoice(model_type="bert", num_layers=5)
    assert check(pool, choice, Layout(pp=4)).departure is None


def test_a_pipeline_alone_gives_equal_bits(pool: Pool) -> None:
    report = check(pool, MODELS["llama"], Layout(pp=2))
    assert [step.measure("gradient").distance for step in report.steps] == [0.0, 0.0, 0.0]
    assert [step.measure("loss").distance for step in report.steps] == [0.0, 0.0, 0.0]


def curve(choice: ModelChoice, layout: Layout, num_steps: int) -> Report:
    return parity(choice, layout, num_steps=num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(dp=2, zero=1)], ids=str)
def test_200_steps_stay_on_the_reference_curve(pool: Pool, layout: Layout) -> None:
    report = pool.run(layout.world_size, curve, MODELS["llama-tied"], layout, 200, timeout=600.0)[0]
    worst = max(abs(step.loss - step.reference_loss) / step.reference_loss for step in report.steps)
    assert worst < 1e-3
