"""Schedules for the tests of schedules: written as text, of all styles and small sizes, or random."""

import random
from collections.abc import Iterable
from itertools import product

from echelon.pipeline.action import Action, Op, Schedule
from echelon.pipeline.schedules import SCHEDULES

Case = tuple[str, int, int, int]  # style, ranks, microbatches, chunks per rank


def parsed(text: str) -> Action:
    """Parse an action such as `0sF1`."""
    return Action(Op(text[1:-1]), int(text[0]), int(text[-1]))


def written(*ranks: str) -> Schedule:
    """Parse a schedule: one string per rank, its actions as they print, separated by spaces."""
    return [[parsed(action) for action in line.split()] for line in ranks]


def chunks_of(name: str, most: int = 3) -> list[int]:
    """Return the tested numbers of chunks per rank of a style."""
    num_chunks = SCHEDULES[name].chunks
    return [num_chunks] if num_chunks else list(range(1, most + 1))


def cases(ranks: int, microbatches: int) -> list[Case]:
    """Return all styles with up to these numbers of ranks and microbatches."""
    sizes = list(product(range(1, ranks + 1), range(1, microbatches + 1)))
    return [(name, p, m, v) for name in SCHEDULES for p, m in sizes for v in chunks_of(name)]


def random_schedule(generator: random.Random, num_ranks: int | None = None) -> tuple[Schedule, int]:
    """Return random computations that can run, and their number of microbatches.

    Stages are on any ranks, and backwards undivided or split. Each rank's computations are in an order that is
    compatible with a common order of all.

    Args:
        num_ranks: every rank has a stage, and runs the backwards of its microbatches in order, so that gradients
            accumulate as in one process. None: any number, ranks may be without work, and any order.
    """
    ordered, num_microbatches = num_ranks is not None, generator.randint(1, 4)
    num_ranks = num_ranks or generator.randint(1, 4)
    holders = [generator.randrange(num_ranks) for _ in range(generator.randint(1, 6))]
    if ordered:
        holders += range(num_ranks)
        generator.shuffle(holders)
    waiting = {}
    for stage, microbatch in product(range(len(holders)), range(num_microbatches)):
        parts = generator.choice([(Op.BACKWARD,), (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)])
        for op in (Op.FORWARD, *parts):
            waiting[Action(op, stage, microbatch)] = holders[stage]
    schedule: Schedule = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while waiting:
        ready = [action for action in waiting if can_run(action, done, len(holders))]
        if ordered:
            ready = [action for action in ready if not is_behind_a_backward(action, waiting)]
        action = generator.choice(ready)
        schedule[waiting.pop(action)].append(action)
        done.add(action)
    return schedule, num_microbatches


def is_behind_a_backward(action: Action, waiting: Iterable[Action]) -> bool:
    """Return True if a backward of the same stage and an earlier microbatch is still to come."""
    return action.op is not Op.FORWARD and any(
        other.op is not Op.FORWARD and other.stage == action.stage and other.microbatch < action.microbatch
        for other in waiting
    )


def can_run(action: Action, done: set[Action], num_stages: int) -> bool:
    op, stage, microbatch = action
    if op is Op.BACKWARD_WEIGHT:
        return Action(Op.BACKWARD_INPUT, stage, microbatch) in done
    if op is Op.FORWARD:
        return stage == 0 or Action(op, stage - 1, microbatch) in done
    after = [Action(kind, stage + 1, microbatch) for kind in (Op.BACKWARD, Op.BACKWARD_INPUT)]
    return Action(Op.FORWARD, stage, microbatch) in done and (
        stage == num_stages - 1 or not done.isdisjoint(after)
    )
