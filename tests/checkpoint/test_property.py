"""A run goes on from a checkpoint under any layout as one process does that never stopped.

Thirty random pairs of layouts, and four more: what is loaded equals what was saved, bit for bit, and six steps agree
with one process within the tolerances of the parity check. Where the layout stays they are the same bits, also with
dropout.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from echelon.verify.layout import Layout, Training
from echelon.verify.models import ModelChoice
from echelon.verify.reference import StepRecord
from echelon.verify.resume import Part, Relay, ResumeReport, compare_parts, read_outcome, run_part

from ..contract.planted.checkpoint import FAULTS
from ..pool import Pool
from .pairs import MODELS, PRECISIONS, ROUNDED_FAR, SCHEDULES, Pair, pairs

PAIRS = tuple(pairs())
QUICK = (0, 7, 9)
AXES = ("tp", "pp", "dp", "sp")


def check(pool: Pool, relay: Relay, folder: Path, then: Callable[..., None] = run_part) -> ResumeReport:
    """The report on a relay, whose parts after the first are run by `then`."""
    run_parts(pool, relay, folder, then)
    return pool.run(1, compare_parts, relay, folder)[0]


def run_wrong(relay: Relay, number: int, folder: Path, *, mutation: str) -> None:
    """A part with a planted fault."""
    with FAULTS[mutation].planted():
        run_part(relay, number, folder)


def run_parts(pool: Pool, relay: Relay, folder: Path, then: Callable[..., None] = run_part) -> None:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(relay.parts):
        pool.run(part.layout.world_size, then if number else run_part, relay, number, folder)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each.number not in QUICK), id=str(each))
        for each in PAIRS
    ],
)
def test_any_layout_goes_on_from_any_other(pool: Pool, tmp_path: Path, pair: Pair) -> None:
    report = check(pool, pair.relay, tmp_path)
    assert report.departure is None
    assert [(each.step, each.differing) for each in report.handovers] == [(3, ())]
    assert report.handovers[0].num_tensors >= 100
    assert len(report.steps) == 6


def test_the_pairs_meet_everything() -> None:
    layouts = [layout for pair in PAIRS for layout in (pair.before, pair.after)]
    assert {pair.model for pair in PAIRS} == set(MODELS)
    assert {layout.precision for layout in layouts} == set(PRECISIONS)
    assert {layout.zero for layout in layouts} == {0, 1, 2}
    assert {layout.sequence for layout in layouts} == {
        None,
        "split_gather",
        "ring",
        "all_to_all",
        "ring_attn",
    }
    schedules = {(layout.schedule, layout.chunks) for layout in layouts if layout.pp > 1}
    assert schedules == {(each["schedule"], each.get("chunks", 1)) for each in SCHEDULES}
    assert {layout.wp for layout in layouts} == {1, 2, 4}
    for axis in AXES:
        sizes = [(getattr(pair.before, axis), getattr(pair.after, axis)) for pair in PAIRS]
        assert {size for each in sizes for size in each} == {1, 2, 4}, axis
        assert sum(before != after for before, after in sizes) >= 5, axis
    # The last of them is after the save.
    assert {pair.overflow_step for pair in PAIRS} == {None, 0, 1, 2, 4}


DROPOUT = {
    "llama": ModelChoice(model_type="llama", settings=(("attention_dropout", 0.2),)),
    "gpt2": ModelChoice(model_type="gpt2", tied=True, settings=(("resid_pdrop", 0.2), ("attn_pdrop", 0.1))),
    "bert": ModelChoice(
        model_type="bert", tied=True, head="masked", settings=(("hidden_dropout_prob", 0.2),)
    ),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*each, id="-".join(map(str, each))) for each in SAME],
)
def test_the_same_layout_with_dropout_goes_on_with_the_same_bits(
    pool: Pool, tmp_path: Path, model: str, layout: Layout
) -> None:
    stopped, whole = resumed_and_whole(pool, DROPOUT[model], layout, tmp_path)
    assert [difference(one, other) for one, other in zip(stopped, whole, strict=True)] == [None] * 6


@pytest.mark.slow
def test_the_check_of_bits_sees_random_states_that_are_not_restored(pool: Pool, tmp_path: Path) -> None:
    model, layout = SAME[0]
    wrong = partial(run_wrong, mutation="random states are not restored")
    stopped, whole = resumed_and_whole(pool, DROPOUT[model], layout, tmp_path, wrong)
    found = [difference(one, other) for one, other in zip(stopped, whole, strict=True)]
    assert found[:3] == [None] * 3
    assert found[3] is not None and found[3].startswith("loss")


def resumed_and_whole(
    pool: Pool, choice: ModelChoice, layout: Layout, folder: Path, then: Callable[..., None] = run_part
) -> tuple[list[StepRecord], list[StepRecord]]:
    """What six steps gave with a stop after three, and without one, or any saving."""
    training = Training(overflow_step=1 if layout.precision == "fp16" else None)
    whole = Relay(choice=choice, parts=(Part(layout=layout, num_steps=6),), training=training)
    stopped = replace(whole, parts=(Part(layout=layout), Part(layout=layout)))
    run_parts(pool, stopped, folder / "stopped", then)
    run_parts(pool, whole, folder / "whole")
    parts = [read_outcome(number, folder / "stopped").records for number in range(2)]
    return [record for records in parts for record in records], read_outcome(0, folder / "whole").records


def difference(one: StepRecord, other: StepRecord) -> str | None:
    """The first thing that is not the same, bit for bit."""
    for name in ("loss", "norm", "loss_scale", "skipped"):
        if getattr(one, name) != getattr(other, name):
            return f"{name}: {getattr(one, name)} and {getattr(other, name)}"
    for kind in ("gradients", "weights"):
        tensors, others = getattr(one, kind), getattr(other, kind)
        if tensors.keys() != others.keys():
            return f"{kind}: of other names"
        for name, tensor in tensors.items():
            if not torch.equal(tensor.nan_to_num(), others[name].nan_to_num()):
                return f"{kind}: {name}"
    return None


CHANGES = (
    ((Layout(tp=2), 2), (Layout(dp=2, zero=1, precision="bf16"), 2)),
    ((Layout(pp=2, precision="bf16"), 2), (Layout(tp=2), 2)),
    ((Layout(dp=2, zero=1, precision="fp16"), 2), (Layout(pp=2, precision="bf16"), 1), (Layout(), 1)),
)


@pytest.mark.slow
@pytest.mark.parametrize("parts", CHANGES, ids=lambda parts: "-".join(str(layout) for layout, _ in parts))
def test_a_run_goes_on_in_another_precision(
    pool: Pool, tmp_path: Path, parts: tuple[tuple[Layout, int], ...]
) -> None:
    relay = Relay(
        choice=MODELS["llama-tied"],
        parts=tuple(Part(layout=layout, num_steps=steps) for layout, steps in parts),
    )
    report = check(pool, relay, tmp_path)
    assert report.departure is None
    assert [each.differing for each in report.handovers] == [()] * (len(parts) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["counts of steps are lost", "options are not loaded"])
@pytest.mark.parametrize("number", ROUNDED_FAR)
def test_what_rounding_accounts_for_hides_no_fault(
    pool: Pool, tmp_path: Path, number: int, mutation: str
) -> None:
    pair = next(each for each in PAIRS if each.number == number)
    report = check(pool, pair.relay, tmp_path, partial(run_wrong, mutation=mutation))
    assert all(each.agrees for step in report.steps[:3] for each in step.measures)
    assert any(not each.agrees for step in report.steps[3:] for each in step.measures)
