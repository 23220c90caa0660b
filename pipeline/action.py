"""Actions of pipeline schedules: one step of a rank, for one stage and one microbatch.

A schedule is plain data, `list[list[Action]]`: the actions of every pipeline rank, in order. The rank of each
stage follows from it. schedules.py writes the lists, communicate.py adds sends and receives, and runner.py
executes them.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """Kind of an action; its value is the printed form.

    A backward is one action, or split in two: the gradients of the stage's inputs, for which the previous stage
    waits, and the gradients of its weights, for which no rank waits (arXiv:2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "sF"
    RECV_FORWARD = "rF"
    SEND_BACKWARD = "sB"
    RECV_BACKWARD = "rB"

    __hash__ = object.__hash__  # Enum hashes the name, in Python code: slow for every look-up of an action


_COMPUTATION = re.compile(r"([FBIW]) stage (\d+) microbatch (\d+)")


class Action(NamedTuple):
    """One step of one rank.

    Args:
        op: its kind.
        stage: the stage that executes it, counted over the whole pipeline. `RECV_FORWARD` of stage 2 receives
            the output of stage 1.
        microbatch: counted from 0.
    """

    op: Op
    stage: int
    microbatch: int

    @property
    def place(self) -> tuple[int, int]:
        """The stage and the microbatch."""
        return self.stage, self.microbatch

    @property
    def label(self) -> str:
        """Its name in reports and profiles: "F stage 1 microbatch 3"."""
        return f"{self.op.value} stage {self.stage} microbatch {self.microbatch}"

    @staticmethod
    def of_label(label: str) -> "Action | None":
        """The computation of this label; None for another text."""
        match = _COMPUTATION.fullmatch(label)
        return None if match is None else Action(Op(match[1]), int(match[2]), int(match[3]))

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
# Weight gradients are not sent.
TRANSFERS = {Op.FORWARD: _ACTIVATIONS, Op.BACKWARD: _GRADIENTS, Op.BACKWARD_INPUT: _GRADIENTS}
COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SENDS = {transfer.send: transfer for transfer in TRANSFERS.values()}
RECEIVES = {transfer.receive: transfer for transfer in TRANSFERS.values()}


def stage_ranks(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return the pipeline rank of each stage: the rank that runs its forwards.

    Raises:
        ValueError: a stage is on no rank, or on two.
    """
    if errors := stage_rank_errors(schedule):
        raise ValueError("the schedule is not valid: " + "; ".join(errors))
    return tuple(next(iter(ranks)) for _, ranks in sorted(_forwards(schedule).items()))


def stage_rank_errors(schedule: Sequence[Sequence[Action]]) -> list[str]:
    """Return the reasons why `stage_ranks` is not defined; empty if it is."""
    forwards = _forwards(schedule)
    if not forwards:
        return ["it has no forward"]
    stages = {action.stage for actions in schedule for action in actions if action.op in COMPUTES}
    errors = [f"stage {stage} is below 0, the first stage" for stage in sorted(stages) if stage < 0]
    errors += [f"no rank has stage {stage}" for stage in range(1 + max(stages)) if stage not in forwards]
    for stage, ranks in sorted(forwards.items()):
        if len(ranks) > 1:
            described = (f"rank {rank} ({first})" for rank, first in ranks.items())
            errors.append(f"stage {stage} is on {' and on '.join(described)}")
    return errors


def _forwards(schedule: Sequence[Sequence[Action]]) -> dict[int, dict[int, Action]]:
    """Return by stage and rank the first forward of the stage on this rank."""
    forwards: dict[int, dict[int, Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op is Op.FORWARD:
                forwards.setdefault(action.stage, {}).setdefault(rank, action)
    return forwards


def result(computation: Action) -> Action:
    """Return the action that stands for a computation's result: for a full backward its input part, else itself."""
    return computation._replace(op=Op.BACKWARD_INPUT) if computation.op is Op.BACKWARD else computation


def inputs(computation: Action, num_stages: int) -> list[Action]:
    """Return the results, as `result` gives them, that a computation needs before it can run."""
    if computation.op is Op.BACKWARD_WEIGHT:
        return [computation._replace(op=Op.BACKWARD_INPUT)]
    source = computation.stage - TRANSFERS[computation.op].step
    needed = [result(computation._replace(stage=source))] if 0 <= source < num_stages else []
    if computation.op is not Op.FORWARD:
        needed.append(computation._replace(op=Op.FORWARD))
    return needed


def send_of(computation: Action, ranks: Mapping[int, int]) -> Action | None:
    """Return the send of a computation's result; None if no other rank needs it.

    Args:
        ranks: the rank of each stage.
    """
    transfer = TRANSFERS.get(computation.op)
    if transfer is None or ranks.get(computation.stage + transfer.step) in (None, ranks[computation.stage]):
        return None
    return computation._replace(op=transfer.send)


def counterpart(action: Action) -> Action:
    """Return the receive that matches a send, or the send that matches a receive."""
    if action.op in SENDS:
        _, receive, step = SENDS[action.op]
        return Action(receive, action.stage + step, action.microbatch)
    send, _, step = RECEIVES[action.op]
    return Action(send, action.stage - step, action.microbatch)
