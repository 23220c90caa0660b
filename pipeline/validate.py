"""Errors of a user-defined schedule, which must be complete, fit the pipeline, and not deadlock."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from .action import COMPUTES, Action, Op, Schedule, stage_rank_errors, stage_ranks
from .communicate import with_communication

_FULL, _SPLIT = Op.BACKWARD, (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_MAX_REPORTED = 20  # errors of one schedule


def user_schedule_errors(
    schedule: Schedule, num_ranks: int, num_microbatches: int | None, num_chunks: int
) -> list[str]:
    """Return all errors of a schedule of computations; empty if there are none.

    Every stage must be on one rank. Every stage and microbatch must have one forward and one backward, full or in two
    parts. Every rank must reach its end, although it waits for results of other ranks.

    Args:
        schedule: the schedule, of any type.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of one step; None: as in the schedule.
        num_chunks: stages per rank; 1: as in the schedule.
    """
    if errors := _form_errors(schedule):
        return errors
    num_in_schedule = 1 + max(action.microbatch for actions in schedule for action in actions)
    num_microbatches = num_microbatches or num_in_schedule
    if errors := list(_size_errors(schedule, num_ranks, (num_in_schedule, num_microbatches), num_chunks)):
        return errors
    if errors := stage_rank_errors(schedule) or list(_count_errors(schedule, num_microbatches)):
        more = [f"and {len(errors) - _MAX_REPORTED} more"] if len(errors) > _MAX_REPORTED else []
        return [f"the schedule is not valid: {'; '.join([*errors[:_MAX_REPORTED], *more])}"]
    try:
        with_communication(schedule)
    except ValueError as error:
        return [str(error)]
    return []


def _form_errors(schedule: Schedule) -> list[str]:
    """Return errors of a schedule, of any type, that is not a list of lists of computations of a training step."""
    if not isinstance(schedule, list) or not all(isinstance(actions, list) for actions in schedule):
        return [f"a schedule is a list with a list of actions for every rank, not {schedule!r:.100}"]
    all_actions = [action for actions in schedule for action in actions]
    for action in all_actions:
        if not (
            isinstance(action, Action)
            and isinstance(action.op, Op)
            and isinstance(action.stage, int)
            and isinstance(action.microbatch, int)
        ):
            # An Action with fields of wrong types has no repr.
            fields = tuple(action) if isinstance(action, tuple) else action
            return [f"a schedule must consist of Action(Op, stage, microbatch), but has {fields!r:.100}"]
        if not (0 <= action.stage < len(all_actions) and 0 <= action.microbatch < len(all_actions)):
            return [
                f"the schedule's {len(all_actions)} actions cannot have so many stages or microbatches: {action!r}"
            ]
    errors = []
    if transfers := [action for action in all_actions if action.op not in COMPUTES]:
        errors.append(f"the schedule has {transfers[0]}: leave sends and receives out, they are added")
    if all(action.op is Op.FORWARD for action in all_actions):
        errors.append(
            "the schedule has no backward: give the schedule for training, evaluation uses its forwards"
        )
    return errors


def _size_errors(
    schedule: Schedule, num_ranks: int, microbatches: tuple[int, int], num_chunks: int
) -> Iterator[str]:
    """Yield errors for numbers of a schedule that are not those of the pipeline.

    Args:
        schedule: the computations of every rank.
        num_ranks: pipeline ranks.
        microbatches: the number of them in the schedule, and in a step.
        num_chunks: stages per rank; 1 allows any.
    """
    if len(schedule) != num_ranks:
        yield f"the schedule is for {len(schedule)} ranks, and the pipeline has {num_ranks}"
    in_schedule, in_step = microbatches
    if in_schedule != in_step:
        yield (
            f"the schedule is for {in_schedule} microbatches, and a step has {in_step}: "
            "give a function of the numbers of ranks and of microbatches where they vary"
        )
    stages = [len({action.stage for action in actions}) for actions in schedule]
    for rank, count in enumerate(stages):
        if not count:
            yield f"the schedule gives rank {rank} no actions"
    if num_chunks != 1 and set(stages) != {num_chunks}:
        yield f"num_model_chunks={num_chunks}, and the schedule's ranks have {stages} stages: leave it out"


def _count_errors(schedule: Schedule, num_microbatches: int) -> Iterator[str]:
    """Yield errors for computations that are missing, repeated, or on another rank than their stage.

    A backward may be full or split; a missing one is reported in the form that the schedule uses.

    Args:
        schedule: every stage is on one rank.
        num_microbatches: of a step.
    """
    ranks = stage_ranks(schedule)
    counts = Counter((rank, action) for rank, actions in enumerate(schedule) for action in actions)
    default_ops = (_FULL,) if any(action.op is _FULL for _, action in counts) else _SPLIT
    for (stage, rank), microbatch in product(enumerate(ranks), range(num_microbatches)):
        backward = {op: Action(op, stage, microbatch) for op in (_FULL, *_SPLIT)}
        backward_ops = [op for op, action in backward.items() if (rank, action) in counts]
        if _FULL in backward_ops and len(backward_ops) > 1:
            both = " and ".join(repr(backward[op]) for op in backward_ops)
            yield f"there are {both}: use either a full backward or its two parts"
        required_ops: tuple[Op, ...] = default_ops
        if _FULL in backward_ops:
            required_ops = tuple(backward_ops)
        elif backward_ops:
            required_ops = _SPLIT
        for op in (Op.FORWARD, *required_ops):
            action = Action(op, stage, microbatch)
            count = counts.pop((rank, action), 0)
            if count == 0:
                yield f"rank {rank} lacks {action}"
            elif count > 1:
                yield f"rank {rank} has {action} {count} times"
    for rank, action in counts:
        yield f"rank {rank} has {action}, which belongs to rank {ranks[action.stage]}"
