"""ZeRO stages and layouts against one process, with all that training goes through.

Every cell is five steps, the second of which overflows on one rank alone. The cells marked slow are the rest of the
matrix: stages × layouts × cases in fp32, and in bf16 and fp16 each stage under each layout with one case.
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity
from echelon.verify.training import LEARNING_RATE, Training

from ..contract.models import Occasional
from ..pool import Pool

LLAMA = ModelChoice(model_type="llama", num_layers=2)
TIED = replace(LLAMA, tied=True)
OVERFLOW = Training(overflow_step=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a cell adds to a stage under a layout."""

    choice: ModelChoice = LLAMA
    training: Training = OVERFLOW
    microbatches: int = 2
    max_norm: float = 0.0

    def under(self, layout: Layout) -> Layout:
        """The layout, with what the case asks of it."""
        return replace(layout, microbatches=self.microbatches, max_norm=self.max_norm)


CASES = {
    "plain": Case(microbatches=1),
    "accumulation": Case(microbatches=3),
    "clipping": Case(max_norm=0.1),
    "groups": Case(training=replace(OVERFLOW, vector_rate=LEARNING_RATE / 3)),
    # A first stage of a pipeline has nothing to train then.
    "lower half frozen": Case(training=replace(OVERFLOW, frozen="lower half")),
    "every second frozen": Case(choice=TIED, training=replace(OVERFLOW, frozen="every second")),
    "tied": Case(choice=TIED),
    # Over two replicas the biases get gradients on the second alone, the first alone, nowhere, nowhere, the second.
    "no gradient": Case(
        choice=Occasional(model_type="llama", num_layers=2),
        training=replace(OVERFLOW, extra_samples=(0, 1, 0, 0)),
    ),
    # The same over four.
    "no gradient of four": Case(
        choice=Occasional(model_type="llama", num_layers=2, tied=True),
        training=replace(OVERFLOW, extra_samples=(0, 1, 0, 0, 0, 0)),
        max_norm=0.1,
    ),
}
LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp4": Layout(dp=4),
    "tp2·dp2": Layout(tp=2, dp=2),
    "pp2·dp2": Layout(pp=2, dp=2),
}
STAGES = (0, 1, 2)
IN_TWOS = {"dp4 in twos": Layout(dp=4, zero_size=2)}
FULL = list(product(STAGES, LAYOUTS, CASES, ["fp32"]))
FULL += product((1, 2), IN_TWOS, CASES, ["fp32"])
# Every stage under every layout once in either format; the cases go round, and each is met in both.
SIXTEEN_BIT = [
    (stage, layout, list(CASES)[(2 * number + shift) % len(CASES)], precision)
    for shift, precision in enumerate(("bf16", "fp16"))
    for number, (stage, layout) in enumerate([*product(STAGES, LAYOUTS), *product((1, 2), IN_TWOS)])
]
# Every stage, layout, case and format at least once.
QUICK = [
    (0, "dp2", "no gradient", "fp32"),
    (0, "tp2·dp2", "clipping", "fp16"),
    (0, "pp2·dp2", "lower half frozen", "fp32"),
    (1, "dp4", "no gradient of four", "fp32"),
    (1, "tp2·dp2", "every second frozen", "fp32"),
    (1, "pp2·dp2", "groups", "bf16"),
    (2, "dp2", "plain", "fp16"),
    (2, "dp4", "accumulation", "fp32"),
    (2, "dp4 in twos", "accumulation", "fp16"),
    (2, "tp2·dp2", "no gradient", "fp32"),
    (2, "pp2·dp2", "tied", "fp32"),
]
CELLS = [*QUICK, *(cell for cell in FULL + SIXTEEN_BIT if cell not in QUICK)]


@pytest.mark.parametrize(
    ("stage", "layout", "case", "precision"),
    [
        pytest.param(
            *cell,
            marks=[] if cell in QUICK else [pytest.mark.slow],
            id=f"zero{cell[0]}·" + "·".join(cell[1:]).replace(" ", "-"),
        )
        for cell in CELLS
    ],
)
def test_five_steps_with_an_overflow_equal_one_process(
    pool: Pool, stage: int, layout: str, case: str, precision: str
) -> None:
    chosen = CASES[case]
    spread = chosen.under(replace((LAYOUTS | IN_TWOS)[layout], zero=stage, precision=precision))
    reports = pool.run(
        spread.world_size, parity, chosen.choice, spread, training=chosen.training, num_steps=5
    )
    assert [report.departure for report in reports] == [None] * spread.world_size
    skipped = reports[0].steps[1]
    assert skipped.measure("weight").allowed == 0.0, "the second step was to be skipped"


def test_the_quick_cells_meet_everything() -> None:
    assert {cell[0] for cell in QUICK} == set(STAGES)
    assert {cell[1] for cell in QUICK} == {*LAYOUTS, *IN_TWOS}
    assert {cell[2] for cell in QUICK} == set(CASES)
    assert {cell[3] for cell in QUICK} == {"fp32", "bf16", "fp16"}
