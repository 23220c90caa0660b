"""The vocabulary of pipeline schedules: what one rank does, on which stage, to which microbatch.

A schedule is plain data, `list[list[Action]]`: for every pipeline rank its actions in order. Who writes such
lists is schedules.py, who adds the sends and receives is communicate.py, who runs them is runner.py.
"""

from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """What an action does. The value is how it is printed."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "sF"
    RECV_FORWARD = "rF"
    SEND_BACKWARD = "sB"
    RECV_BACKWARD = "rB"


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


TRAVELS = {
    Op.FORWARD: Travel(Op.SEND_FORWARD, Op.RECV_FORWARD, +1),
    Op.BACKWARD: Travel(Op.SEND_BACKWARD, Op.RECV_BACKWARD, -1),
}
COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD})
SENDS = {travel.send: travel for travel in TRAVELS.values()}
RECEIVES = {travel.receive: travel for travel in TRAVELS.values()}


def stage_rank(stage: int, num_ranks: int) -> int:
    """The pipeline rank that holds a stage: stages are dealt out in turn."""
    return stage % num_ranks


def inputs(action: Action, num_stages: int) -> list[Action]:
    """The computations whose results a computation needs."""
    source = action.stage - TRAVELS[action.op].step
    needed = [action._replace(stage=source)] if 0 <= source < num_stages else []
    if action.op is Op.BACKWARD:
        needed.append(action._replace(op=Op.FORWARD))
    return needed


def counterpart(action: Action) -> Action:
    """The receive that a send belongs to, and the other way round."""
    if action.op in SENDS:
        travel = SENDS[action.op]
        return Action(travel.receive, action.stage + travel.step, action.microbatch)
    travel = RECEIVES[action.op]
    return Action(travel.send, action.stage - travel.step, action.microbatch)
