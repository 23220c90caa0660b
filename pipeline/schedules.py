"""Pipeline schedules as data: in which order each rank computes. Sends and receives are communicate.py.

Every schedule is a function of the number of pipeline ranks and of microbatches, and any number of either
works, also fewer microbatches than ranks.
"""

from collections.abc import Callable

from .action import Action, Op, Schedule

_FORWARD_OPS = frozenset({Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD})


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv:1811.06965).

    The bubble is (p - 1) / m of the work; every rank holds the activations of all m microbatches.
    """
    _check_sizes(num_ranks, num_microbatches)
    return [
        [
            Action(op, rank, microbatch)
            for op in (Op.FORWARD, Op.BACKWARD)
            for microbatch in range(num_microbatches)
        ]
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As few forwards ahead as keep the last rank busy, then forward and backward in turn (arXiv:2006.09503).

    The bubble is that of GPipe; rank r holds the activations of at most p - r microbatches.
    """
    _check_sizes(num_ranks, num_microbatches)
    return [_one_f_one_b_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _one_f_one_b_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    forwards = [Action(Op.FORWARD, rank, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(Op.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches)]
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[num_microbatches - warmup :]


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule and what they send and receive, for evaluation."""
    return [[action for action in actions if action.op in _FORWARD_OPS] for actions in schedule]


def _check_sizes(num_ranks: int, num_microbatches: int) -> None:
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"a schedule of {num_ranks} pipeline ranks and {num_microbatches} microbatches: "
            "both must be at least 1"
        )


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
