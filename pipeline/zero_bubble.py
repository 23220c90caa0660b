"""Zero-bubble schedules: backwards in two parts, so that weight gradients fill what would be idle time.

Gradients of a stage's inputs are computed as soon as possible, since the stage before waits for them; those of
its weights are computed when nothing else can be (arXiv:2401.10241).
"""

from .action import Action, Op, Schedule
from .pattern import Step, check_sizes, numbered

_F, _I, _W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B in which rank r computes weight gradients r microbatches late: ZB-H1 of arXiv:2401.10241.

    Every rank waits for (p - 1) (F + I - W) where there are at least p microbatches and W is not longer than F
    or I, and for (p - 1) (F + I + W) in 1F1B: for a third of it where all are equal. Every rank holds the
    activations of at most p microbatches, as the first one does in 1F1B.
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
    the last stage, and a microbatch's backward starts on the rank where the microbatch came in. Where F = I = W
    and there are at least 2p - 1 microbatches no rank waits between its first and its last computation. Every
    rank holds the activations of at most 2p chunks: those of p microbatches, as the first one does in 1F1B.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return [_v_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    stages = [rank, 2 * num_ranks - 1 - rank]
    return numbered(_v_steps(rank, num_ranks, num_microbatches), stages, num_microbatches)


def _v_steps(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    there, back = 0, 1
    after = num_ranks - rank  # ranks from this one to the turn
    fill = [(_F, there)] * (2 * after - 1) + [(_F, back), (_F, there)] * rank
    first_back = [(_F, back), (_I, back), (_W, back)] * after
    # None with fewer microbatches than ranks. Made for 2p - 1 at least, as published, with what is too much
    # left out, the schedule is 5 % longer where m < 2p - 1 (p to 16, F = 1, I = 1.2, W = 0.8).
    steady = [(op, chunk) for chunk in (there, back) for op in (_F, _I, _W)] * (num_microbatches - num_ranks)
    drain = [(_I, there), (_I, back)] * rank + [(_I, there), (_W, there)] * after
    held_back = [(_W, back)] * rank + [(_W, there)] * rank
    return fill + first_back + steady + drain + held_back
