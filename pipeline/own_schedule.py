"""Whether a schedule that a user wrote can be run on a pipeline. Echelon's own are schedules.py."""

from .action import COMPUTES, Action, Op, Schedule
from .communicate import with_communication
from .validate import computation_faults, validate

MOST_TOLD = 20  # faults of one schedule


def own_schedule_faults(
    schedule: Schedule, num_ranks: int, num_microbatches: int | None, num_chunks: int
) -> list[str]:
    """What is wrong with a schedule of computations; empty if nothing is.

    Args:
        schedule: anything that was given as one.
        num_ranks: pipeline ranks.
        num_microbatches: of one step; None: those that the schedule has.
        num_chunks: stages per rank; 1: those that the schedule has.
    """
    faults = _form_faults(schedule)
    if not faults:
        if num_microbatches is None:
            num_microbatches = _num_microbatches(schedule)
        faults = _size_faults(schedule, num_ranks, num_microbatches, num_chunks)
    return faults or _run_faults(schedule, num_microbatches or 0)


def _form_faults(schedule: Schedule) -> list[str]:
    if not isinstance(schedule, list) or not all(isinstance(actions, list) for actions in schedule):
        return [f"a schedule is a list with a list of actions for every rank, not {schedule!r:.100}"]
    everything = [action for actions in schedule for action in actions]
    strange = [action for action in everything if not _is_action(action)]
    if strange:
        # An Action that is none inside cannot print itself.
        told = tuple(strange[0]) if isinstance(strange[0], tuple) else strange[0]
        return [f"a schedule is made of Action(Op, stage, microbatch), and it has {told!r:.100}"]
    most = len(everything)
    wild = [
        action for action in everything if not (0 <= action.stage < most and 0 <= action.microbatch < most)
    ]
    if wild:
        return [
            f"the schedule has {wild[0]!r}, and its {most} actions cannot have so many stages or microbatches"
        ]
    faults = []
    transfers = [action for action in everything if action.op not in COMPUTES]
    if transfers:
        faults.append(f"the schedule has {transfers[0]}: leave sends and receives out, they are added")
    if all(action.op is Op.FORWARD for action in everything):
        faults.append(
            "the schedule has no backward: write the one for training, evaluation takes its forwards"
        )
    return faults


def _is_action(action: object) -> bool:
    return (
        isinstance(action, Action)
        and isinstance(action.op, Op)
        and isinstance(action.stage, int)
        and isinstance(action.microbatch, int)
    )


def _size_faults(schedule: Schedule, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    faults = []
    if len(schedule) != num_ranks:
        faults.append(f"the schedule is for {len(schedule)} ranks, and the pipeline has {num_ranks}")
    if _num_microbatches(schedule) != num_microbatches:
        faults.append(
            f"the schedule is for {_num_microbatches(schedule)} microbatches, and a step has {num_microbatches}: "
            "give a function of the numbers of ranks and of microbatches where they vary"
        )
    stages = [len({action.stage for action in actions}) for actions in schedule]
    faults += [
        f"the schedule gives rank {rank} nothing to do" for rank, count in enumerate(stages) if not count
    ]
    if num_chunks != 1 and set(stages) != {num_chunks}:
        faults.append(
            f"num_model_chunks={num_chunks}, and the schedule's ranks have {stages} stages: leave it out"
        )
    return faults


def _num_microbatches(schedule: Schedule) -> int:
    return 1 + max(action.microbatch for actions in schedule for action in actions)


def _run_faults(schedule: Schedule, num_microbatches: int) -> list[str]:
    faults = computation_faults(schedule, num_microbatches)
    if faults:
        more = [f"and {len(faults) - MOST_TOLD} more"] if len(faults) > MOST_TOLD else []
        return [f"the schedule is not valid: {'; '.join([*faults[:MOST_TOLD], *more])}"]
    try:
        validate(with_communication(schedule), num_microbatches)
    except ValueError as error:
        return [str(error)]
    return []
