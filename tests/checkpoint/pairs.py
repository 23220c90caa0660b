"""Random pairs of layouts: a run begins under the first, and goes on under the second. Drawn alike by every process."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.verify.layout import Layout, Training
from echelon.verify.models import ModelChoice
from echelon.verify.resume import Part, Relay

# A vocabulary of 101 is padded on every tensor axis. Of a relu one unit that switches makes T5's gradients jump. A
# quarter of an expert has to have rows of 16 bytes in 16 bits.
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
    {"tp": tp, "pp": pp, "dp": dp, "sp": sp}
    for tp in (1, 2, 4)
    for pp in (1, 2, 4)
    for dp in (1, 2, 4)
    for sp in (1, 2, 4)
    if 2 <= tp * pp * dp * sp <= 4
]
# Two whose rounding goes farther than that of the one process beside it: in 33 a token changes its expert in the first
# step, since two of them are nearer to each other than bf16 tells apart; in 35 an entry of a weight, of a gradient that
# fp16 does not tell from zero, goes the other way in the first step.
ROUNDED_FAR = (33, 35)
# Thirty, and of those that would be drawn after them the first that have what none before has: gradients that are not
# finite after the save, and gpipe with one stage on a rank.
NUMBERS = (*range(30), 30, *ROUNDED_FAR, 41)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Where a run is saved after three steps, and where it takes three more.

    Args:
        number: of the pair.
        model: a key of MODELS.
        before, after: the layouts, of one precision.
        overflow_step: the step whose gradients are not finite on one rank; None for none.
    """

    number: int
    model: str
    before: Layout
    after: Layout
    overflow_step: int | None = None

    @property
    def relay(self) -> Relay:
        """The run."""
        return Relay(
            choice=MODELS[self.model],
            parts=(Part(layout=self.before), Part(layout=self.after)),
            training=Training(overflow_step=self.overflow_step),
            seed=self.number,
        )

    def __str__(self) -> str:
        overflow = "" if self.overflow_step is None else f"-overflow{self.overflow_step + 1}"
        return f"{self.number:02}-{self.model}-{self.before}-{self.after}{overflow}"


def pairs() -> Iterator[Pair]:
    """All pairs, the same every time."""
    for number in NUMBERS:
        draw = random.Random(number)
        model = list(MODELS)[number % len(MODELS)]
        precision = PRECISIONS[draw.randrange(len(PRECISIONS))]
        before, after = (_layout(draw, model, precision) for _ in range(2))
        overflow_step = draw.choice((0, 1, 2, 4)) if precision == "fp16" else None
        yield Pair(number=number, model=model, before=before, after=after, overflow_step=overflow_step)


def _layout(draw: random.Random, model: str, precision: str) -> Layout:
    while True:
        sizes = draw.choice(SIZES)
        data = sizes["dp"] * sizes["sp"]
        layout = Layout(
            **sizes,
            **draw.choice(SCHEDULES if sizes["pp"] > 1 else SCHEDULES[:1]),
            sequence=draw.choice(_modes(sizes)),
            wp=draw.choice((1, 1, data)) if sizes["tp"] == 1 else 1,
            zero=draw.choice((0, 1, 2)) if data > 1 else 0,
            precision=precision,
            microbatches=draw.choice((2, 3, 4)),
        )
        # T5's attention counts positions by itself: its sequences are spread over the tensor axis alone.
        is_possible = sizes["sp"] == 1 or model != "t5-tied"
        if is_possible and not (len(layout.config.placement) > 4 or layout.errors()):
            return layout


def _modes(sizes: dict[str, int]) -> tuple[str | None, ...]:
    if sizes["sp"] > 1:
        return ("all_to_all", "ring_attn")
    return (None, "split_gather", "ring") if sizes["tp"] > 1 else (None,)
