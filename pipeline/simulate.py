"""When each rank computes what, under given costs, without processes. Drawing it is not done here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .action import COMPUTES, Action, Op, inputs


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What an action costs, in any one unit of time.

    Args:
        forward, backward: of one microbatch through one stage.
        send: from the end of a computation until another rank can use its result; keeps no rank busy.
    """

    forward: float = 1.0
    backward: float = 2.0
    send: float = 0.0

    def __post_init__(self) -> None:
        if self.forward <= 0 or self.backward <= 0 or self.send < 0:
            raise ValueError(f"{self}: forward and backward must be positive, send must not be negative")

    def of(self, op: Op) -> float:
        """What a computation costs."""
        return {Op.FORWARD: self.forward, Op.BACKWARD: self.backward}[op]


class Span(NamedTuple):
    """A computation and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What every rank did when.

    Args:
        spans: per rank, in order of time.
        peak_activations: per rank, how many microbatches' activations it held at once at most, counted once
            for every stage: from the start of a forward to the end of its backward.
    """

    spans: list[list[Span]]
    peak_activations: list[int]

    @property
    def end(self) -> float:
        """When the last rank is done; the first starts at 0."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle time over work, of all ranks together; a perfect pipeline has 0."""
        work = sum(span.end - span.start for spans in self.spans for span in spans)
        return (self.end * len(self.spans) - work) / work if work else 0.0

    def idle(self, rank: int) -> float:
        """How long a rank did nothing until the last one was done."""
        return self.end - sum(span.end - span.start for span in self.spans[rank])


def simulate(schedule: Sequence[Sequence[Action]], costs: Costs) -> Timeline:
    """Run a schedule on a clock: a computation starts when its rank is free and its inputs are there.

    Args:
        schedule: computations of every rank; sends and receives may be there too and cost `costs.send` alike.
        costs: of every computation and transfer.

    Raises:
        ValueError: a computation can never start.
    """
    compute = [[action for action in actions if action.op in COMPUTES] for actions in schedule]
    return Timeline(spans=_clock(compute, costs), peak_activations=[_peak(actions) for actions in compute])


def _clock(compute: Sequence[Sequence[Action]], costs: Costs) -> list[list[Span]]:
    num_stages = 1 + max((action.stage for actions in compute for action in actions), default=-1)
    holders = {action: rank for rank, actions in enumerate(compute) for action in actions}
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in compute]
    left = len(holders)
    while left:
        before = left
        for rank, actions in enumerate(compute):
            for action in actions[len(spans[rank]) :]:
                needed = inputs(action, num_stages)
                if not all(need in ends for need in needed):
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                ready = [ends[need] + (costs.send if holders[need] != rank else 0.0) for need in needed]
                start = max([free, *ready])
                ends[action] = start + costs.of(action.op)
                spans[rank].append(Span(action, start, ends[action]))
                left -= 1
        if left == before:
            heads = [
                actions[len(done)]
                for actions, done in zip(compute, spans, strict=True)
                if len(done) < len(actions)
            ]
            raise ValueError(f"the schedule deadlocks: {', '.join(map(repr, heads))} can never start")
    return spans


def _peak(actions: Sequence[Action]) -> int:
    if all(action.op is Op.FORWARD for action in actions):  # evaluation: nothing is kept for a backward
        return min(1, len(actions))
    held = peak = 0
    for action in actions:
        held += 1 if action.op is Op.FORWARD else -1
        peak = max(peak, held)
    return peak
