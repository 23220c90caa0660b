"""Simulate timelines of a pipeline under given costs, without processes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .action import COMPUTES, Action, Op, inputs, result, stage_ranks


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of actions, in any one unit of time.

    Args:
        forward, backward_input, backward_weight: for one microbatch and one stage. A full backward costs the sum
            of its parts.
        send: time from the end of a computation until another rank can use its result; occupies no rank.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    send: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward, self.backward_input, self.backward_weight) <= 0 or self.send < 0:
            raise ValueError(f"{self}: computations must cost more than 0, and send at least 0")

    def of(self, op: Op) -> float:
        """Return the cost of a computation."""
        return {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward_input + self.backward_weight,
            Op.BACKWARD_INPUT: self.backward_input,
            Op.BACKWARD_WEIGHT: self.backward_weight,
        }[op]

    def per_chunk(self, num_chunks: int) -> "Costs":
        """Return the costs of one stage, if a rank's layers are split into `num_chunks` equal stages."""
        return replace(
            self,
            forward=self.forward / num_chunks,
            backward_input=self.backward_input / num_chunks,
            backward_weight=self.backward_weight / num_chunks,
        )


class Span(NamedTuple):
    """A computation with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Computations of every rank, with their times.

    Args:
        spans: per rank, in order of time.
        peak_activations: per rank, the maximum number of microbatches whose activations it keeps at once, summed
            over its stages. They are kept from the start of a forward to the end of its backward, or of its weight
            gradients if the backward is split.
    """

    spans: list[list[Span]]
    peak_activations: list[int]

    @property
    def end(self) -> float:
        """The time at which the last rank finishes; the first starts at 0."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle time divided by work, over all ranks; a perfect pipeline has 0."""
        work = sum(map(self._work, range(len(self.spans))))
        return (self.end * len(self.spans) - work) / work if work else 0.0

    @property
    def peak_shares(self) -> list[float]:
        """`peak_activations` in units of the activations of one microbatch on all stages of the rank."""
        stages = [len({span.action.stage for span in spans}) for spans in self.spans]
        return [
            peak / count if count else 0.0 for peak, count in zip(self.peak_activations, stages, strict=True)
        ]

    def idle(self, rank: int) -> float:
        """Return the time for which a rank was idle until the last rank finished."""
        return self.end - self._work(rank)

    def _work(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.spans[rank])


def simulate(schedule: Sequence[Sequence[Action]], costs: Costs | Sequence[Costs]) -> Timeline:
    """Simulate a schedule: a computation starts when its rank is free and its inputs have arrived.

    Args:
        schedule: computations of every rank. Sends and receives may be included and are ignored: every transfer
            costs `costs.send` of the stage that sends.
        costs: costs of computations and transfers, of all stages or of each.

    Raises:
        ValueError: a computation can never start, or a stage is on no rank or on two.
    """
    compute = [[action for action in actions if action.op in COMPUTES] for actions in schedule]
    if isinstance(costs, Costs):
        costs = [costs] * len(stage_ranks(compute))
    return Timeline(
        spans=_simulate_spans(compute, costs),
        peak_activations=[_num_kept(actions) for actions in compute],
    )


def _simulate_spans(compute: Sequence[Sequence[Action]], costs: Sequence[Costs]) -> list[list[Span]]:
    """Return the spans of every rank; see `simulate`."""
    ranks = stage_ranks(compute)
    ends: dict[Action, float] = {}  # by result, the time when it is computed
    spans: list[list[Span]] = [[] for _ in compute]
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(compute):
            done = spans[rank]
            while len(done) < len(actions):
                action = actions[len(done)]
                needed = inputs(action, len(ranks))
                if not ends.keys() >= set(needed):
                    break
                arrivals = [
                    ends[input_] + (costs[input_.stage].send if ranks[input_.stage] != rank else 0.0)
                    for input_ in needed
                ]
                start = max([done[-1].end if done else 0.0, *arrivals])
                done.append(Span(action, start, start + costs[action.stage].of(action.op)))
                ends[result(action)] = done[-1].end
                progressed = True
    blocked = [
        actions[len(done)] for actions, done in zip(compute, spans, strict=True) if len(done) < len(actions)
    ]
    if blocked:
        raise ValueError(f"the schedule deadlocks: {', '.join(map(repr, blocked))} can never start")
    return spans


def _num_kept(actions: Sequence[Action]) -> int:
    """Return the largest number of microbatches whose activations a rank keeps at once; see `Timeline`."""
    if all(action.op is Op.FORWARD for action in actions):  # evaluation: nothing is kept for a backward
        return min(1, len(actions))
    current = peak = 0
    for action in actions:
        current += action.op is Op.FORWARD
        peak = max(peak, current)
        current -= action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return peak
