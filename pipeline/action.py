"""The vocabulary of pipeline schedules: one rank's step, on a stage, for a microbatch.

A schedule is plain data, `list[list[Action]]`: for every pipeline rank its actions in order. The rank of each
stage is read off it. Lists are written by schedules.py, completed with sends and receives by
communicate.py, and run by runner.py.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """Kind of an action; the value is how it prints.

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
        op: its kind.
        stage: the stage that does it, counted over the whole pipeline. `RECV_FORWARD` of stage 2 is the
            arrival at stage 2 of what stage 1 computed.
        microbatch: counted from 0.
    """

    op: Op
    stage: int
    microbatch: int

    @property
    def place(self) -> tuple[int, int]:
        """Its stage and microbatch."""
        return self.stage, self.microbatch

    def __repr__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


Schedule = list[list[Action]]


class Transfer(NamedTuple):
    """Transfer of a computation's result to the stage that needs it: `step` stages further."""

    send: Op
    receive: Op
    step: int


_ACTIVATIONS = Transfer(Op.SEND_FORWARD, Op.RECV_FORWARD, +1)
_GRADIENTS = Transfer(Op.SEND_BACKWARD, Op.RECV_BACKWARD, -1)
# A weight gradient stays where it is.
TRANSFERS = {Op.FORWARD: _ACTIVATIONS, Op.BACKWARD: _GRADIENTS, Op.BACKWARD_INPUT: _GRADIENTS}
COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SENDS = {transfer.send: transfer for transfer in TRANSFERS.values()}
RECEIVES = {transfer.receive: transfer for transfer in TRANSFERS.values()}


def stage_ranks(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The pipeline rank of each stage: the one that does its forwards.

    Raises:
        ValueError: some stage is on no rank, or on two.
    """
    if errors := stage_rank_errors(schedule):
        raise ValueError("the schedule is not valid: " + "; ".join(errors))
    return tuple(next(iter(ranks)) for _, ranks in sorted(_forwards(schedule).items()))


def stage_rank_errors(schedule: Sequence[Sequence[Action]]) -> list[str]:
    """Reasons why `stage_ranks` is not defined; empty where it is."""
    found = _forwards(schedule)
    if not found:
        return ["it has no forward"]
    named = {action.stage for actions in schedule for action in actions if action.op in COMPUTES}
    errors = [f"there is no stage {stage}: the first is 0" for stage in sorted(named) if stage < 0]
    errors += [f"no rank holds stage {stage}" for stage in range(1 + max(named)) if stage not in found]
    for stage, ranks in sorted(found.items()):
        if len(ranks) > 1:
            each = (f"rank {rank} ({first})" for rank, first in ranks.items())
            errors.append(f"stage {stage} is held by {' and by '.join(each)}")
    return errors


def _forwards(schedule: Sequence[Sequence[Action]]) -> dict[int, dict[int, Action]]:
    """The first forward of every stage on every rank that has one."""
    found: dict[int, dict[int, Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op is Op.FORWARD:
                found.setdefault(action.stage, {}).setdefault(rank, action)
    return found


def result(computation: Action) -> Action:
    """The result of a computation, named alike for a whole backward and for its input part."""
    return computation._replace(op=Op.BACKWARD_INPUT) if computation.op is Op.BACKWARD else computation


def inputs(computation: Action, num_stages: int) -> list[Action]:
    """The results that a computation needs."""
    if computation.op is Op.BACKWARD_WEIGHT:
        return [computation._replace(op=Op.BACKWARD_INPUT)]
    source = computation.stage - TRANSFERS[computation.op].step
    needed = [result(computation._replace(stage=source))] if 0 <= source < num_stages else []
    if computation.op is not Op.FORWARD:
        needed.append(computation._replace(op=Op.FORWARD))
    return needed


def send_of(computation: Action, ranks: Mapping[int, int]) -> Action | None:
    """The send of a computation's result; None where no rank needs it, or only the one that has it.

    Args:
        ranks: the rank of each stage.
    """
    transfer = TRANSFERS.get(computation.op)
    if transfer is None or ranks.get(computation.stage + transfer.step) in (None, ranks[computation.stage]):
        return None
    return computation._replace(op=transfer.send)


def counterpart(action: Action) -> Action:
    """The receive that a send belongs to, and the other way round."""
    if action.op in SENDS:
        _, receive, step = SENDS[action.op]
        return Action(receive, action.stage + step, action.microbatch)
    send, _, step = RECEIVES[action.op]
    return Action(send, action.stage - step, action.microbatch)
