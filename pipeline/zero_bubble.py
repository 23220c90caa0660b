"""Zero-bubble schedules: backwards in two parts, so that weight gradients fill what would be idle time.

Gradients of a stage's inputs are computed as soon as possible, since the stage before waits for them; those of
its weights are computed when nothing else can be (arXiv:2401.10241).
"""

from .action import Action, Op, Schedule
from .pattern import Step, check_sizes, numbered

_F, _I, _W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B in which rank r computes weight gradients r microbatches late: ZB-H1 of arXiv:2401.10241.

    The bubble is that of 1F1B less 2 (p - 1) W, a third where F = I = W: the ranks that wait least at the
    start wait for nothing at the end. Every rank holds the activations of at most p microbatches, as the
    first rank does in 1F1B.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return [
        numbered(_h1_steps(rank, num_ranks, num_microbatches), [rank], num_microbatches)
        for rank in range(num_ranks)
    ]


def _h1_steps(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    warmup = [_F] * (num_ranks - 1 - rank)
    holding_back = [_F, _I] * rank
    steady = [_F, _I, _W] * num_microbatches
    return [(op, 0) for op in warmup + holding_back + steady]


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two chunks per rank, placed there and back: ZB-V of arXiv:2401.10241.

    Stage s is on rank s on the way there and on rank 2p - 1 - s on the way back, so the first rank also has
    the last stage, and a microbatch's backward starts where its forward ended. Where F = I = W and there are
    at least 2p microbatches no rank waits between its first and its last computation. Every rank holds the
    activations of at most 2p chunks: those of p microbatches, as the first rank of 1F1B does.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return [_v_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    stages = [rank, 2 * num_ranks - 1 - rank]
    # Fewer microbatches than fill the pipeline: see [Note: steps beyond the last microbatch].
    return numbered(
        _v_steps(rank, num_ranks, max(num_microbatches, 2 * num_ranks - 1)), stages, num_microbatches
    )


def _v_steps(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """For at least 2p - 1 microbatches; the steady part goes on after the last forward there."""
    there, back = 0, 1
    after = num_ranks - rank  # ranks from this one to the turn
    fill = [(_F, there)] * (2 * after - 1) + [(_F, back), (_F, there)] * rank
    first_back = [(_F, back), (_I, back), (_W, back)] * after
    steady = [(op, chunk) for chunk in (there, back) for op in (_F, _I, _W)] * (num_microbatches - num_ranks)
    drain = [(_I, there), (_I, back)] * rank + [(_I, there), (_W, there)] * after
    held_back = [(_W, back)] * rank + [(_W, there)] * rank
    return fill + first_back + steady + drain + held_back
