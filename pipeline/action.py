"""The vocabulary of pipeline schedules: what one rank does, on which stage, to which microbatch.

A schedule is plain data, `list[list[Action]]`: for every pipeline rank its actions in order. Which rank holds
which stage is read off it. Who writes such lists is schedules.py, who adds the sends and receives is
communicate.py, who runs them is runner.py.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """What an action does. The value is how it is printed.

    A backward is done whole, or in two parts: the gradients of the stage's inputs, for which the stage before
    waits, and the gradients of its weights, for which nobody waits (arXiv:2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "sF"
    RECV_FORWARD = "rF"
    SEND_BACKWARD = "sB"
    RECV_BACKWARD = "rB"

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python: a cost at every look-up of an action


class Action(NamedTuple):
    """One step of one rank.

    Args:
        op: what is done.
        stage: the stage that does it, counted over the whole pipeline. `RECV_FORWARD` of stage 2 is the
            arrival at stage 2 of what stage 1 computed.
        microbatch: which microbatch, from 0.
    """

    op: Op
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


Schedule = list[list[Action]]


class Travel(NamedTuple):
    """How the result of a computation reaches the stage that needs it: `step` stages further."""

    send: Op
    receive: Op
    step: int


_FORWARDS = Travel(Op.SEND_FORWARD, Op.RECV_FORWARD, +1)
_BACKWARDS = Travel(Op.SEND_BACKWARD, Op.RECV_BACKWARD, -1)
# What a weight gradient computes stays where it is.
TRAVELS = {Op.FORWARD: _FORWARDS, Op.BACKWARD: _BACKWARDS, Op.BACKWARD_INPUT: _BACKWARDS}
COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SENDS = {travel.send: travel for travel in TRAVELS.values()}
RECEIVES = {travel.receive: travel for travel in TRAVELS.values()}


def placement(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The pipeline rank that holds each stage: the one that does its forwards.

    Raises:
        ValueError: some stage is held by no rank, or by two.
    """
    faults = placement_faults(schedule)
    if faults:
        raise ValueError("the schedule is not valid: " + "; ".join(faults))
    return tuple(next(iter(holders)) for _, holders in sorted(_forwards(schedule).items()))


def placement_faults(schedule: Sequence[Sequence[Action]]) -> list[str]:
    """Why `placement` cannot tell who holds which stage; empty where it can."""
    found = _forwards(schedule)
    if not found:
        return ["it has no forward"]
    named = {action.stage for actions in schedule for action in actions if action.op in COMPUTES}
    faults = [f"there is no stage {stage}: the first is 0" for stage in sorted(named) if stage < 0]
    faults += [f"no rank holds stage {stage}" for stage in range(1 + max(named)) if stage not in found]
    for stage, holders in sorted(found.items()):
        if len(holders) > 1:
            told = (f"rank {rank} ({first})" for rank, first in holders.items())
            faults.append(f"stage {stage} is held by {' and by '.join(told)}")
    return faults


def _forwards(schedule: Sequence[Sequence[Action]]) -> dict[int, dict[int, Action]]:
    """The first forward of every stage on every rank that has one."""
    found: dict[int, dict[int, Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op is Op.FORWARD:
                found.setdefault(action.stage, {}).setdefault(rank, action)
    return found


def result(computation: Action) -> Action:
    """What a computation gives, named by one action whichever way it was computed.

    A whole backward gives what its input part gives: the gradients that the stage before needs.
    """
    return computation._replace(op=Op.BACKWARD_INPUT) if computation.op is Op.BACKWARD else computation


def inputs(computation: Action, num_stages: int) -> list[Action]:
    """The results that a computation needs."""
    if computation.op is Op.BACKWARD_WEIGHT:
        return [computation._replace(op=Op.BACKWARD_INPUT)]
    source = computation.stage - TRAVELS[computation.op].step
    needed = [result(computation._replace(stage=source))] if 0 <= source < num_stages else []
    if computation.op is not Op.FORWARD:
        needed.append(computation._replace(op=Op.FORWARD))
    return needed


def send_of(computation: Action, holders: Mapping[int, int]) -> Action | None:
    """The send of a computation's result; None where no rank needs it, or only the one that has it.

    Args:
        holders: the rank that holds each stage.
    """
    travel = TRAVELS.get(computation.op)
    if travel is None or holders.get(computation.stage + travel.step) in (None, holders[computation.stage]):
        return None
    return computation._replace(op=travel.send)


def counterpart(action: Action) -> Action:
    """The receive that a send belongs to, and the other way round."""
    if action.op in SENDS:
        travel = SENDS[action.op]
        return Action(travel.receive, action.stage + travel.step, action.microbatch)
    travel = RECEIVES[action.op]
    return Action(travel.send, action.stage - travel.step, action.microbatch)
