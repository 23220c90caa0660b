"""A parity row as data."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import Report, parity

from ..late_completion import late_completion

PLAIN = Training()


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """A model under a layout, to compare with one process, and further arguments of the comparison.

    Args:
        choice, layout, training, num_steps: arguments of `parity`.
        name: name of the row, unless model and layout describe it.
        batch: makes the batches, like `make_batch`.
        within: a context for the run, on every rank.
        exact: tolerance of loss and gradients of the first step, in units of the largest; None for the default.
        quick: part of `make test`; all communication then completes late, see late_completion.py.
        missing: why the installed packages cannot run it; empty if they can.
    """

    choice: ModelChoice
    layout: Layout
    name: str = ""
    training: Training = PLAIN
    num_steps: int = 3
    batch: Callable[..., dict[str, Any]] = make_batch
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    exact: float | None = None
    quick: bool = False
    missing: str = ""

    def __str__(self) -> str:
        choice, layout = self.choice, self.layout
        name = self.name or f"{choice.model_type}-{choice.head_name}{'-tied' * choice.tied}"
        rest = [f"{choice.num_layers}layers"] * (choice.num_layers != 4)
        rest += [f"{layout.microbatches}microbatches"] * (layout.microbatches != 3)
        rest += ["clipped"] * bool(layout.max_norm)
        return "-".join([name, str(layout), *rest]).replace(" ", "_")

    def run(self) -> Report:
        """Compare; for a quick row all communication completes late. Collective over the world."""
        with late_completion() if self.quick else nullcontext():
            return self.compare()

    def compare(self) -> Report:
        """Compare with communication as it is. Collective over the world."""
        with self.within(), patch("echelon.verify.parity.make_batch", self.batch):
            return parity(self.choice, self.layout, training=self.training, num_steps=self.num_steps)


def as_quick(row: ParityRow) -> ParityRow:
    """Return a row as a quick one: of two layers, and two steps."""
    return replace(row, choice=replace(row.choice, num_layers=2), num_steps=2, quick=True)


def distinct(rows: Iterable[ParityRow]) -> dict[str, ParityRow]:
    """Return the rows by name; of equal rows the first, which is quick if any of them is.

    Raises:
        ValueError: two different rows have the same name.
    """
    by_name: dict[str, ParityRow] = {}
    for row in rows:
        if by_name.setdefault(str(row), row) not in (row, replace(row, quick=True)):
            raise ValueError(f"two rows are called {row}: give them names")
    return by_name
