"""One rank's schedule written without numbers: which step of which chunk, again and again.

The schedules themselves are schedules.py and zero_bubble.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from .action import Action, Op

Step = tuple[Op, int]  # what is done, and for which of the rank's stages, counted on the rank


def numbered(steps: Iterable[Step], stages: Sequence[int], num_microbatches: int) -> list[Action]:
    """The actions of a pattern: equal steps take the microbatches in turn.

    [Note: steps beyond the last microbatch]
    Steps that would take a microbatch beyond the last are left out. Where a pattern runs for many microbatches
    it runs for fewer: whole microbatches are missing then, on all ranks, nothing that is left needs them, and
    nothing starts later than with them.

    Args:
        steps: in order.
        stages: the rank's stages; a step names one by its place here.
        num_microbatches: microbatches of the step.
    """
    taken: Counter[Step] = Counter()
    actions = []
    for op, chunk in steps:
        if taken[op, chunk] < num_microbatches:
            actions.append(Action(op, stages[chunk], taken[op, chunk]))
            taken[op, chunk] += 1
    return actions


def check_sizes(*, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raise ValueError where a size is below 1."""
    sizes = {"pipeline ranks": num_ranks, "microbatches": num_microbatches, "chunks per rank": num_chunks}
    wrong = [f"{size} {noun}" for noun, size in sizes.items() if size < 1]
    if wrong:
        raise ValueError(f"a schedule cannot have {' and '.join(wrong)}: each must be at least 1")
