"""A run that is saved under one layout or plugin resumes under another, with the numbers of an uninterrupted process.

Loaded tensors are bitwise equal to the saved ones. Six steps agree with one process within the tolerances of the
parity check. Under the same layout they are bitwise equal, also with dropout.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from echelon.checkpoint.difference import Comparison
from echelon.checkpoint.inspection import Findings, examine, open_folder
from echelon.verify.layout_choice import AXES, Layout, Training
from echelon.verify.model_choice import ModelChoice
from echelon.verify.reference import StepRecord
from echelon.verify.resume import Leg, Relay, ResumeReport, compare_legs, read_outcome, run_leg

from ..contract.planted.checkpoint import FAULTS
from ..pool import Pool
from .runs import Run, config_of
from .torch_parts import run_torch_leg

# A vocabulary of 101 is padded on every tensor axis. With relu, one unit that switches makes T5's gradients jump. A
# quarter of an expert must have rows of 16 bytes in 16 bits.
MODELS = {
    "llama": ModelChoice(model_type="llama"),
    "gpt2-tied": ModelChoice(model_type="gpt2", tied=True),
    "bert-tied": ModelChoice(model_type="bert", head="masked", tied=True),
    "mixtral": ModelChoice(model_type="mixtral", settings=(("intermediate_size", 64),)),
    "t5-tied": ModelChoice(model_type="t5", tied=True, settings=(("feed_forward_proj", "gated-gelu"),)),
    "llama-tied": ModelChoice(model_type="llama", tied=True),
}
PRECISIONS = ("fp32", "bf16", "fp16", "fp32")
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "gpipe", "chunks": 2},
    {"schedule": "interleaved", "chunks": 2},
    {"schedule": "zbh1"},
    {"schedule": "zbv"},
)
SIZES = [
    dict(zip(("tp", "pp", "dp", "sp"), sizes, strict=True))
    for sizes in product((1, 2, 4), repeat=4)
    if 2 <= prod(sizes) <= 4
]
QUICK = (0,)


def drawn_layout(draw: random.Random, model: str, precision: str) -> Layout:
    while True:
        sizes = draw.choice(SIZES)
        data = sizes["dp"] * sizes["sp"]
        modes = ("all_to_all", "ring_attn") if sizes["sp"] > 1 else (None, "split_gather", "ring")
        layout = Layout(
            **sizes,
            **draw.choice(SCHEDULES if sizes["pp"] > 1 else SCHEDULES[:1]),
            sequence=draw.choice(modes if max(sizes["sp"], sizes["tp"]) > 1 else (None,)),
            wp=draw.choice((1, 1, data)) if sizes["tp"] == 1 else 1,
            zero=draw.choice((0, 1, 2)) if data > 1 else 0,
            precision=precision,
            microbatches=draw.choice((2, 3, 4)),
        )
        # T5's attention computes positions itself: its sequences can be sharded over the tensor axis only.
        is_possible = sizes["sp"] == 1 or model != "t5-tied"
        if is_possible and not (len(layout.config.stage_ranks) > 4 or layout.errors()):
            return layout


def drawn_relays() -> Iterator[tuple[str, Relay]]:
    """Draw thirty pairs of layouts, and two for uncovered features; the same in every process."""
    for number in (*range(31), 41):
        draw = random.Random(number)
        model = list(MODELS)[number % len(MODELS)]
        precision = PRECISIONS[draw.randrange(len(PRECISIONS))]
        legs = tuple(Leg(layout=drawn_layout(draw, model, precision)) for _ in range(2))
        overflow = draw.choice((0, 1, 2, 4)) if precision == "fp16" else None
        training = Training(overflow_step=overflow)
        name = f"{number:02}-{model}-{legs[0].layout}-{legs[1].layout}"
        yield name, Relay(choice=MODELS[model], legs=legs, training=training, seed=number)


def changed(*legs: tuple[Layout, int]) -> tuple[str, Relay]:
    """Make a relay of legs in different precisions."""
    parts = tuple(Leg(layout=layout, num_steps=num_steps) for layout, num_steps in legs)
    return "-".join(map(str, parts)), Relay(choice=MODELS["llama-tied"], legs=parts)


RELAYS = dict(drawn_relays())
REPLICAS, STAGES = Layout(dp=2, zero=1), Layout(pp=2, precision="bf16")
CHANGES = dict(
    (
        changed((Layout(tp=2), 2), (replace(REPLICAS, precision="bf16"), 2)),
        changed((STAGES, 2), (Layout(tp=2), 2)),
        changed((replace(REPLICAS, precision="fp16"), 2), (STAGES, 1), (Layout(), 1)),
    )
)
IS_QUICK = (*(list(RELAYS)[number] for number in QUICK), *list(CHANGES)[:1])


def run_parts(pool: Pool, relay: Relay, folder: Path, *runs: Callable[..., None]) -> None:
    """Run the legs of a relay with the given functions, the remaining ones with `run_leg`."""
    folder.mkdir(exist_ok=True)
    for number, leg in enumerate(relay.legs):
        run = runs[number] if number < len(runs) else run_leg
        pool.run(leg.layout.world_size, run, relay, number, folder)


def reported(pool: Pool, relay: Relay, folder: Path, *runs: Callable[..., None]) -> ResumeReport:
    run_parts(pool, relay, folder, *runs)
    report = pool.run(1, compare_legs, relay, folder)[0]
    assert report.departure is None
    assert [handover.differing for handover in report.handovers] == [()] * (len(relay.legs) - 1)
    assert report.handovers[0].num_tensors >= 50
    assert len(report.steps) == sum(leg.num_steps for leg in relay.legs)
    return report


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in IS_QUICK)) for name in (*RELAYS, *CHANGES)],
)
def test_any_layout_resumes_from_any_other(pool: Pool, tmp_path: Path, name: str) -> None:
    reported(pool, (RELAYS | CHANGES)[name], tmp_path)


# Experts over ranks: of common parameters, of one with rows that no expert uses, and a module for each expert.
EXPERTS = [
    ("mixtral", Layout(dp=4, ep=4), Layout(tp=2, pp=2)),
    ("longcat_flash", Layout(dp=4, ep=2, zero=1), Layout(dp=2)),
    ("switch_transformers", Layout(dp=2, ep=2), Layout(dp=4, ep=4, zero=1)),
    ("switch_transformers", Layout(dp=4, ep=2, zero=1), Layout()),
    ("switch_transformers", Layout(dp=2, ep=2, precision="bf16"), Layout(dp=2, zero=2, precision="bf16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "before", "after"), EXPERTS, ids=str)
def test_experts_resume_on_other_ranks(
    pool: Pool, tmp_path: Path, model_type: str, before: Layout, after: Layout
) -> None:
    if model_type != "mixtral" and "step3p7" not in CONFIG_MAPPING:
        pytest.skip("before 5.24, transformers calls these experts in another way")
    legs = (Leg(layout=before, num_steps=2), Leg(layout=after, num_steps=2))
    reported(pool, Relay(choice=ModelChoice(model_type=model_type), legs=legs), tmp_path)


def test_the_drawn_pairs_cover_all_features() -> None:
    layouts = [leg.layout for relay in RELAYS.values() for leg in relay.legs]
    assert {relay.choice for relay in RELAYS.values()} == set(MODELS.values())
    assert {layout.precision for layout in layouts} == set(PRECISIONS)
    assert {layout.zero for layout in layouts} == {0, 1, 2}
    modes = {None, "split_gather", "ring", "all_to_all", "ring_attn"}
    assert {layout.sequence for layout in layouts} == modes
    schedules = {(layout.schedule, layout.chunks) for layout in layouts if layout.pp > 1}
    assert schedules == {(schedule["schedule"], schedule.get("chunks", 1)) for schedule in SCHEDULES}
    assert {layout.wp for layout in layouts} == {1, 2, 4}
    for axis in AXES:
        sizes = [[getattr(leg.layout, axis) for leg in relay.legs] for relay in RELAYS.values()]
        assert {size for pair in sizes for size in pair} == {1, 2, 4}, axis
        assert sum(before != after for before, after in sizes) >= 5, axis
    # Step 4 is after the save.
    assert {relay.training.overflow_step for relay in RELAYS.values()} == {None, 0, 1, 2, 4}


HYBRID = Layout(tp=2, pp=2)
PLUGINS = {
    "hybrid, fsdp, hybrid": (HYBRID, Layout(dp=4), Layout(dp=2, zero=2)),
    "ddp, hybrid, ddp": (Layout(dp=2), HYBRID, Layout(dp=3)),
    "fsdp, ddp, fsdp": (Layout(dp=3), Layout(dp=2), Layout(dp=4)),
}


PLUGIN_RUNS = [
    (model, case, precision)
    for model in ("llama", "gpt2-tied")
    for case in PLUGINS
    for precision in ("fp32", "bf16", "fp16")[: 1 + 2 * ("ddp" not in case)]
]
QUICK_RUN = ("llama", "fsdp, ddp, fsdp", "fp32")


@pytest.mark.parametrize(
    ("model", "case", "precision"),
    [pytest.param(*run, marks=[pytest.mark.slow] * (run != QUICK_RUN)) for run in PLUGIN_RUNS],
)
def test_a_run_resumes_under_another_plugin(
    pool: Pool, tmp_path: Path, model: str, case: str, precision: str
) -> None:
    kinds = case.split(", ")
    layouts = (
        replace(layout, precision=precision, microbatches=2 if kind == "hybrid" else 1)
        for kind, layout in zip(kinds, PLUGINS[case], strict=True)
    )
    # In FSDP's leg: torch's scaler lacks the overflow counts of a hybrid leg.
    training = Training(overflow_step=2 if precision == "fp16" else None)
    legs = tuple(Leg(layout=layout, num_steps=2) for layout in layouts)
    relay = Relay(choice=MODELS[model], legs=legs, training=training)
    runs = (run_leg if kind == "hybrid" else partial(run_torch_leg, kind=kind) for kind in kinds)
    reported(pool, relay, tmp_path, *runs)


DROPOUT = {
    "llama": ModelChoice(model_type="llama", settings=(("attention_dropout", 0.2),)),
    "gpt2": ModelChoice(model_type="gpt2", tied=True, settings=(("resid_pdrop", 0.2), ("attn_pdrop", 0.1))),
    "bert": replace(MODELS["bert-tied"], settings=(("hidden_dropout_prob", 0.2),)),
    "mixtral": replace(MODELS["mixtral"], settings=(("intermediate_size", 64), ("attention_dropout", 0.2))),
    "t5": ModelChoice(model_type="t5", tied=True, settings=(("dropout_rate", 0.2),)),
}
SAME = [
    ("gpt2", Layout(tp=2, dp=2, zero=1)),
    ("llama", Layout(pp=2, dp=2, zero=2, schedule="interleaved", chunks=2, microbatches=4, precision="fp16")),
    ("llama", Layout(dp=2, sp=2, sequence="all_to_all", wp=2, zero=1, precision="bf16")),
    ("bert", Layout(tp=2, pp=2, schedule="zbv", sequence="split_gather")),
    ("mixtral", Layout(tp=4, sequence="ring", precision="bf16")),
    ("t5", Layout(pp=2, tp=2, precision="fp16")),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in SAME],
)
def test_the_same_layout_with_dropout_resumes_with_the_same_bits(
    pool: Pool, tmp_path: Path, model: str, layout: Layout
) -> None:
    assert departures(pool, DROPOUT[model], layout, tmp_path) == [None] * 6


def run_wrong(relay: Relay, number: int, folder: Path) -> None:
    with FAULTS["random states are not restored"].planted():
        run_leg(relay, number, folder)


@pytest.mark.slow
def test_the_check_of_bits_sees_random_states_that_are_not_restored(pool: Pool, tmp_path: Path) -> None:
    differing = departures(pool, DROPOUT["gpt2"], SAME[0][1], tmp_path, run_leg, run_wrong)
    assert differing[:3] == [None] * 3 and (differing[3] or "").startswith("loss")


def departures(
    pool: Pool, choice: ModelChoice, layout: Layout, folder: Path, *runs: Callable[..., None]
) -> list[str | None]:
    """Compare each of six steps, stopped after three, with an uninterrupted run that saves nothing; bitwise."""
    training = Training(overflow_step=1 if layout.precision == "fp16" else None)
    uninterrupted = Relay(choice=choice, legs=(Leg(layout=layout, num_steps=6),), training=training)
    stopped = replace(uninterrupted, legs=(Leg(layout=layout), Leg(layout=layout)))
    run_parts(pool, stopped, folder / "stopped", *runs)
    run_parts(pool, uninterrupted, folder / "whole")
    legs = [read_outcome(number, folder / "stopped").records for number in range(2)]
    records = [record for records in legs for record in records]
    return [*map(departure, records, read_outcome(0, folder / "whole").records)]


def departure(one: StepRecord, other: StepRecord) -> str | None:
    """Return the first value that differs in any bit."""
    for name in ("loss", "norm", "loss_scale", "skipped"):
        if getattr(one, name) != getattr(other, name):
            return f"{name}: {getattr(one, name)} and {getattr(other, name)}"
    for kind in ("gradients", "weights"):
        tensors, others = getattr(one, kind), getattr(other, kind)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            if not torch.equal(tensor.nan_to_num(), others[name].nan_to_num()):
                return f"{kind}: {name}"
    return None


def save_first(directory: Path) -> None:
    run = Run(config_of(tie_word_embeddings=True), tp_size=2, zero_stage=1, precision="fp16")
    run.step(0)
    run.booster.save_checkpoint(directory, 3, **run.everything, user={"note": "x"}).wait()


def save_again(directory: Path, out: Path) -> None:
    run = Run(config_of(tie_word_embeddings=True), seed=7, pp_size=2, precision="fp16")
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None
    run.booster.save_checkpoint(out, resumed.step, **run.everything, user=resumed.user).wait()


def test_a_checkpoint_saved_again_under_another_layout_is_equal_to_the_bit(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(4, save_first, tmp_path / "a")
    pool.run(2, save_again, tmp_path / "a", tmp_path / "b")
    folders = [tmp_path / directory / "step-00000003" for directory in ("a", "b")]
    for folder in folders:
        assert examine(folder, progress=lambda _: None) == Findings(errors=(), notes=())
    a, b = map(open_folder, folders)
    assert a.training["layout"] != b.training["layout"]
    assert list(Comparison(a, b).differences(lambda _: None)) == []
