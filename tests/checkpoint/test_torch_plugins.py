"""Torch's data parallelism goes on from checkpoints of split models, and the other way round."""

from functools import partial
from pathlib import Path

import pytest

from echelon.verify.layout import Layout, Training
from echelon.verify.resume import Part, Relay, compare_parts, run_part

from ..pool import Pool
from .pairs import MODELS
from .torch_parts import run_torch_part

HYBRID = Layout(tp=2, pp=2)
CASES = {
    "hybrid, fsdp, hybrid": (("hybrid", HYBRID), ("fsdp", Layout(dp=4)), ("hybrid", Layout(dp=2, zero=2))),
    "ddp, hybrid, ddp": (("ddp", Layout(dp=2)), ("hybrid", HYBRID), ("ddp", Layout(dp=3))),
    "fsdp, ddp, fsdp": (("fsdp", Layout(dp=3)), ("ddp", Layout(dp=2)), ("fsdp", Layout(dp=4))),
}
FORMATS = [(case, precision) for case in CASES for precision in ("fp32", "bf16", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "precision"), [each for each in FORMATS if each[1] == "fp32" or "ddp" not in each[0]]
)
@pytest.mark.parametrize("model", ["llama", "gpt2-tied"])
def test_a_run_goes_on_under_another_plugin(
    pool: Pool, tmp_path: Path, model: str, case: str, precision: str
) -> None:
    kinds = [kind for kind, _ in CASES[case]]
    parts = tuple(Part(layout=_of(layout, kind, precision), num_steps=2) for kind, layout in CASES[case])
    # In FSDP's part: torch's scaler has none of the counts that a hybrid part keeps of overflows.
    training = Training(overflow_step=2 if precision == "fp16" else None)
    relay = Relay(choice=MODELS[model], parts=parts, training=training)
    for number, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        run = run_part if kind == "hybrid" else partial(run_torch_part, kind=kind)
        pool.run(part.layout.world_size, run, relay, number, tmp_path)
    report = pool.run(1, compare_parts, relay, tmp_path)[0]
    assert report.departure is None
    assert [each.differing for each in report.handovers] == [(), ()]


def _of(layout: Layout, kind: str, precision: str) -> Layout:
    microbatches = 2 if kind == "hybrid" else 1
    axes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "zero")}
    return Layout(**axes, precision=precision, microbatches=microbatches)
