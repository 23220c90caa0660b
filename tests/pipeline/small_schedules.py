"""Schedules for the tests of schedules: written as text, of all styles and small sizes, or random."""

import random
from itertools import product

from echelon.pipeline.action import Action, Op, Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import SCHEDULES, build_schedule

Case = tuple[str, int, int, int]  # style, ranks, microbatches, chunks per rank


def parsed(text: str) -> Action:
    """`0sF1` as an action."""
    return Action(Op(text[1:-1]), int(text[0]), int(text[-1]))


def written(*ranks: str) -> Schedule:
    """A schedule from one line per rank, as lists of actions print without their commas."""
    return [[parsed(action) for action in line.split()] for line in ranks]


def chunks_of(name: str, most: int = 3) -> list[int]:
    """Which numbers of chunks per rank a style is tried with."""
    own = SCHEDULES[name].chunks
    return [own] if own else list(range(1, most + 1))


def cases(ranks: int, microbatches: int) -> list[Case]:
    """All styles with 1 to so many ranks and microbatches."""
    sizes = list(product(range(1, ranks + 1), range(1, microbatches + 1)))
    return [(name, p, m, v) for name in SCHEDULES for p, m in sizes for v in chunks_of(name)]


def random_schedule(generator: random.Random) -> tuple[Schedule, int]:
    """Computations in an order that can be run: stages on any ranks, backwards whole or split, each rank's
    computations in any order that agrees with one order of all. And their number of microbatches."""
    num_ranks, num_microbatches = generator.randint(1, 4), generator.randint(1, 4)
    holders = [generator.randrange(num_ranks) for _ in range(generator.randint(1, 6))]
    waiting = {}
    for stage, microbatch in product(range(len(holders)), range(num_microbatches)):
        parts = generator.choice([(Op.BACKWARD,), (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)])
        for op in (Op.FORWARD, *parts):
            waiting[Action(op, stage, microbatch)] = holders[stage]
    schedule: Schedule = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while waiting:
        ready = [action for action in waiting if can_run(action, done, len(holders))]
        action = generator.choice(ready)
        schedule[waiting.pop(action)].append(action)
        done.add(action)
    return schedule, num_microbatches


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


def shuffled(generator: random.Random) -> tuple[Schedule, int]:
    """A schedule of any style with a few neighbours swapped, so perhaps not valid. And its microbatches."""
    name, num_microbatches = generator.choice(list(SCHEDULES)), generator.randint(1, 4)
    compute = build_schedule(name, generator.randint(2, 4), num_microbatches, 1)
    schedule = with_communication(compute, ahead=generator.random() < 0.5)
    for _ in range(generator.randint(1, 6)):
        actions = generator.choice(schedule)
        index = generator.randrange(len(actions) - 1)
        actions[index : index + 2] = reversed(actions[index : index + 2])
    return schedule, num_microbatches
