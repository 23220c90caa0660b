"""A row of parity, as data."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from echelon.verify.batch import make_batch
from echelon.verify.layout import Layout, Training
from echelon.verify.models import ModelChoice
from echelon.verify.parity import Report, parity

from ..late_completion import late_completion

PLAIN = Training()


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """A model under a layout beside one process, and what else the comparison is given.

    Args:
        choice, layout, training, num_steps: of `parity`.
        name: what the row is about, where model and layout do not say it.
        batch: makes the batches, like `make_batch`.
        within: a context for the run, on every rank.
        exact: how far loss and gradients of the first step may be off, in units of the largest; None is as usual.
        quick: part of `make test`; all communication completes late there, see late_completion.py.
        missing: why the installed packages cannot run it; empty where they can.
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
        """Compare; of a quick row all communication completes late. Collective over the world."""
        with late_completion() if self.quick else nullcontext():
            return self.compare()

    def compare(self) -> Report:
        """Compare over the processes as they are. Collective over the world."""
        with self.within(), patch("echelon.verify.parity.make_batch", self.batch):
            return parity(self.choice, self.layout, training=self.training, num_steps=self.num_steps)


def distinct(rows: Iterable[ParityRow]) -> dict[str, ParityRow]:
    """The rows by name; of equal ones the first, which is quick if any is.

    Raises:
        ValueError: two rows that differ have one name.
    """
    found: dict[str, ParityRow] = {}
    for row in rows:
        if found.setdefault(str(row), row) not in (row, replace(row, quick=True)):
            raise ValueError(f"two rows are called {row}: give them names")
    return found
