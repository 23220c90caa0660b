"""A run that is saved and goes on under other layouts, beside one process that never stopped. See parity.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..pipeline.microbatch import merge, split
from .compare import StepComparison, first_departure
from .contents import Contents, contents_of, differing
from .layout import Layout
from .models import ModelChoice
from .parity import (
    AS_USUAL,
    Batches,
    Report,
    boosted_under,
    compare_with_one_process,
    drawn_batches,
    take_steps,
)
from .reference import StepRecord
from .training import Training


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run, which begins from what the one before saved.

    Args:
        layout: how it is spread.
        num_steps: optimizer steps.
    """

    layout: Layout
    num_steps: int = 3

    def __str__(self) -> str:
        return f"{self.layout}×{self.num_steps}"


@dataclass(frozen=True, kw_only=True)
class Relay:
    """A run in parts, each under a layout and in processes of its own.

    Args:
        choice: the model.
        parts: in their order.
        training: what the steps go through, counted from the first part's.
        seed: of the model's weights and of the batches.
    """

    choice: ModelChoice
    parts: tuple[Part, ...]
    training: Training = AS_USUAL
    seed: int = 0

    def first_step(self, number: int) -> int:
        """How many steps there are before a part."""
        return sum(part.num_steps for part in self.parts[:number])

    def batches(self, number: int) -> list[Batches]:
        """The batches of each step of a part, by replica.

        A step has the same samples whatever the number of replicas: those that the layout with most microbatches
        draws, dealt out to as many replicas as the part's has.
        """
        layouts = [part.layout for part in self.parts]
        drawing = max(layouts, key=lambda each: each.dp * each.microbatches)
        first, own = self.first_step(number), self.parts[number]
        drawn = [
            drawn_batches(self.choice, drawing, self.training, step, self.seed)
            for step in range(first, first + own.num_steps)
        ]
        if own.layout.dp == drawing.dp:
            return drawn
        return [split(merge(each), num_microbatches=own.layout.dp, microbatch_size=None) for each in drawn]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a part was, whole.

    Args:
        records: what each step gave.
        loaded: what it began with; None for the first part.
        saved: what it ended with; None for the last.
    """

    records: list[StepRecord]
    loaded: Contents | None
    saved: Contents | None


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What was loaded beside what was saved.

    Args:
        step: the number of steps before it.
        num_tensors: how many were compared.
        differing: names of what is not the same.
    """

    step: int
    num_tensors: int
    differing: tuple[str, ...]

    def __str__(self) -> str:
        if not self.differing:
            return (
                f"after step {self.step}: {self.num_tensors} tensors of weights and states loaded bit for bit"
            )
        more = f" and {len(self.differing) - 3} more" if len(self.differing) > 3 else ""
        return f"after step {self.step}: {', '.join(self.differing[:3])}{more} differ from what was saved"


@dataclass(frozen=True, kw_only=True)
class ResumeReport(Report):
    """A parity report over all parts, and what was handed over between them."""

    handovers: tuple[Handover, ...]


def run_part(relay: Relay, number: int, folder: Path) -> None:
    """Train a part, from the checkpoint of the one before, and save one for the next; write down what it was.

    Collective over the world, which has the size of the part's layout.

    Args:
        folder: of this relay alone; the parts run in their order.
    """
    # Other weights than the run's own, which show that loading replaced them.
    model = relay.choice.build(relay.seed + number)
    relay.training.freeze(model)
    run = boosted_under(relay.parts[number].layout, model, relay.training)
    first, batches = relay.first_step(number), relay.batches(number)
    loaded = saved = None
    if number:
        resumed = run.booster.load_checkpoint(folder, model=run.model, optimizer=run.optimizer)
        if resumed is None or resumed.step != first:
            raise AssertionError(f"part {number} was to go on from step {first} and found {resumed}")
        loaded = contents_of(run.model, run.optimizer)
    records = take_steps(run, relay.training, batches, first_step=first)
    if number + 1 < len(relay.parts):
        saved = contents_of(run.model, run.optimizer)
        step = first + len(batches)
        run.booster.save_checkpoint(folder, step, model=run.model, optimizer=run.optimizer).wait()
    if dist.get_rank() == 0:
        write_outcome(Outcome(records=records, loaded=loaded, saved=saved), number, folder)


def compare_parts(relay: Relay, folder: Path) -> ResumeReport:
    """Compare all parts, which were run, with one process that never stopped. In one process alone."""
    outcomes = [read_outcome(number, folder) for number in range(len(relay.parts))]
    handovers = []
    for number in range(1, len(outcomes)):
        saved, loaded = outcomes[number - 1].saved, outcomes[number].loaded
        assert saved is not None and loaded is not None
        handovers.append(
            Handover(
                step=relay.first_step(number),
                num_tensors=len(saved.tensors),
                differing=tuple(differing(saved, loaded)),
            )
        )
    model = relay.choice.build(relay.seed)
    relay.training.freeze(model)
    parts = [(part.layout, relay.batches(number)) for number, part in enumerate(relay.parts)]
    found = [record for outcome in outcomes for record in outcome.records]
    steps = compare_with_one_process(model, parts, relay.training, found)
    return ResumeReport(
        steps=tuple(steps), departure=_first_departure(steps, handovers), handovers=tuple(handovers)
    )


def write_outcome(outcome: Outcome, number: int, folder: Path) -> None:
    """Write a part's outcome beside its checkpoint."""
    torch.save(outcome, _path(number, folder))


def read_outcome(number: int, folder: Path) -> Outcome:
    """What `write_outcome` wrote."""
    found: Outcome = torch.load(_path(number, folder), weights_only=False)  # this run's own file
    return found


def _path(number: int, folder: Path) -> Path:
    return folder / f"part-{number}.pt"


def _first_departure(steps: Sequence[StepComparison], handovers: Sequence[Handover]) -> str | None:
    """What departs first, in the order of the run."""
    for handover in handovers:
        departure = first_departure(steps[: handover.step])
        if departure is not None or handover.differing:
            return departure or str(handover)
    return first_departure(steps)
