"""Pipeline schedules as data: in which order each rank computes. Sends and receives are communicate.py.

Every schedule is a function of the number of pipeline ranks p and of microbatches m, and any number of either
works, also fewer microbatches than ranks. Bubbles are idle time over work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from .action import Op, Schedule, placement
from .own_schedule import own_schedule_faults
from .pattern import Step, check_sizes, numbered
from .zero_bubble import zero_bubble_h1, zero_bubble_v

UserSchedule = Schedule | Callable[[int, int], Schedule]  # a function of num_ranks and num_microbatches


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (arXiv:1811.06965).

    With v chunks per rank, dealt out in turn, the bubble is (p - 1) / (v m) for m >= p; every rank holds the
    activations of all m microbatches.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    chunks = range(num_chunks)
    forwards = [(Op.FORWARD, chunk) for chunk in chunks for _ in range(num_microbatches)]
    backwards = [(Op.BACKWARD, chunk) for chunk in reversed(chunks) for _ in range(num_microbatches)]
    return [
        numbered(forwards + backwards, _dealt_stages(rank, num_ranks, num_chunks), num_microbatches)
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As few forwards ahead as keep the last rank busy, then forward and backward in turn (arXiv:2006.09503).

    The bubble is that of GPipe; rank r holds the activations of at most p - r microbatches.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    steady: list[Step] = [(Op.FORWARD, 0), (Op.BACKWARD, 0)] * num_microbatches
    return [
        numbered([(Op.FORWARD, 0)] * (num_ranks - 1 - rank) + steady, [rank], num_microbatches)
        for rank in range(num_ranks)
    ]


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over v chunks per rank, dealt out in turn (arXiv:2104.04473, figure 4). One chunk makes 1F1B.

    Microbatches go through the chunks in groups of g: of p where p divides m, else in the most equal groups of
    p or more. The bubble is (p - 1) / (v m) for m >= p, whether or not p divides m. Rank r holds the
    activations of at most (v - 1) g + 2 (p - r) - 1 chunks: p (1 + (p - 1) / (p v)) times those of all its
    chunks on the first rank, where g = p.

    Where p does not divide m, groups of p and what is left would hold less, but a group of fewer than p waits
    at each of its chunks. Of all p to 8, m to 24 and v to 4 with m > p such orders have on average twice this
    bubble (up to 4.5 times) or deadlock, and hold 1.25 p microbatches where this one holds 1.5 p (at most 1.9).
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return [
        numbered(
            _interleaved_steps(rank, num_ranks, num_microbatches, num_chunks),
            _dealt_stages(rank, num_ranks, num_chunks),
            num_microbatches,
        )
        for rank in range(num_ranks)
    ]


def _interleaved_steps(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Step]:
    groups = _groups(num_ranks, num_microbatches)
    chunks = [chunk for size in groups for chunk in range(num_chunks) for _ in range(size)]
    forwards = [(Op.FORWARD, chunk) for chunk in chunks]
    backwards = [(Op.BACKWARD, num_chunks - 1 - chunk) for chunk in chunks]
    after = num_ranks - 1 - rank
    warmup = after if num_chunks == 1 else 2 * after + (num_chunks - 1) * groups[0]
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[len(forwards[warmup:]) :]]


def _groups(num_ranks: int, num_microbatches: int) -> list[int]:
    """The largest first: its warm-up is enough for the others."""
    count = max(1, num_microbatches // num_ranks)
    return [num_microbatches // count + (index < num_microbatches % count) for index in range(count)]


def _dealt_stages(rank: int, num_ranks: int, num_chunks: int) -> list[int]:
    return [chunk * num_ranks + rank for chunk in range(num_chunks)]


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, for evaluation; without sends and receives."""
    return [[action for action in actions if action.op is Op.FORWARD] for actions in schedule]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a schedule that has a name is made.

    Args:
        build: from the numbers of ranks, microbatches and chunks per rank to its computations. One that makes
            its own number of chunks does not look at what was asked for.
        chunks: chunks per rank that it makes; None: as many as asked for.
    """

    build: Callable[[int, int, int], Schedule]
    chunks: int | None


SCHEDULES: dict[str, Style] = {
    "gpipe": Style(build=gpipe, chunks=None),
    "1f1b": Style(build=lambda ranks, microbatches, _: one_f_one_b(ranks, microbatches), chunks=1),
    "interleaved": Style(build=interleaved, chunks=None),
    "zbh1": Style(build=lambda ranks, microbatches, _: zero_bubble_h1(ranks, microbatches), chunks=1),
    "zbv": Style(build=lambda ranks, microbatches, _: zero_bubble_v(ranks, microbatches), chunks=2),
}


def build_schedule(
    style: str | UserSchedule,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    usual_placement: Sequence[int] | None = None,
) -> Schedule:
    """The computations of every rank.

    Args:
        style: one of `SCHEDULES`, or a schedule of the user's own: its computations, or a function of the
            numbers of ranks and microbatches that makes them.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of one step.
        num_chunks: stages per rank; 1 also where the style makes another number of its own.
        usual_placement: the rank of each stage that a user's function must keep to; None allows any.

    Raises:
        ValueError: what `style_faults` finds; a schedule of the user's own is for another number of
            microbatches, or its function places the stages by that number, or has sends and receives.
    """
    if isinstance(style, str):
        _refuse(_name_faults(style, num_chunks))
        return SCHEDULES[style].build(num_ranks, num_microbatches, num_chunks)
    try:
        schedule = _sample(style, num_ranks, num_chunks, num_microbatches)
    except Exception as error:
        raise ValueError(_failing(num_ranks, num_microbatches, error)) from error
    _refuse(own_schedule_faults(schedule, num_ranks, num_microbatches, num_chunks))
    if usual_placement is not None and placement(schedule) != tuple(usual_placement):
        raise ValueError(
            f"the schedule's function places the stages on ranks {placement(schedule)} for {num_microbatches} "
            f"microbatches, and the model was cut for {tuple(usual_placement)}: the placement must not follow from "
            "the number of microbatches"
        )
    return schedule


def stage_placement(
    style: str | UserSchedule, num_ranks: int, num_chunks: int, num_microbatches: int | None = None
) -> tuple[int, ...]:
    """The pipeline rank that holds each stage, for any number of microbatches.

    Args:
        num_microbatches: what a user's function is asked for, where it is known.

    Raises:
        ValueError: the style is not one of `SCHEDULES` or does not take the number of chunks; a stage of the
            user's own schedule is held by no rank, or by two.
    """
    return placement(_sample(style, num_ranks, num_chunks, num_microbatches))


def splits_backward(style: str | UserSchedule, num_ranks: int, num_microbatches: int | None = None) -> bool:
    """Whether weight gradients are computed apart, in a schedule that has no `style_faults`."""
    schedule = _sample(style, num_ranks, 1, num_microbatches)
    return any(action.op is Op.BACKWARD_WEIGHT for actions in schedule for action in actions)


def style_faults(
    style: str | UserSchedule, num_chunks: int, num_ranks: int, num_microbatches: int | None = None
) -> list[str]:
    """What is wrong with a choice of schedule; empty if nothing is.

    Args:
        num_microbatches: of a step, where it is known already.
    """
    if isinstance(style, str):
        return _name_faults(style, num_chunks)
    try:
        schedule = _sample(style, num_ranks, num_chunks, num_microbatches)
    except Exception as error:  # whatever a user's function raises is told as a fault of it
        return [_failing(num_ranks, num_microbatches or 2 * num_ranks, error)]
    if callable(style):
        num_microbatches = num_microbatches or 2 * num_ranks
    return own_schedule_faults(schedule, num_ranks, num_microbatches, num_chunks)


def _failing(num_ranks: int, num_microbatches: int, error: Exception) -> str:
    return (
        f"the schedule's function fails for {num_ranks} ranks and {num_microbatches} microbatches: "
        f"{type(error).__name__}: {error}"
    )


def _sample(
    style: str | UserSchedule, num_ranks: int, num_chunks: int, num_microbatches: int | None
) -> Schedule:
    """A schedule for some number of microbatches, of which 2p suits what a user's function may ask of it."""
    if isinstance(style, str):
        return build_schedule(style, num_ranks, 1, num_chunks)
    return style(num_ranks, num_microbatches or 2 * num_ranks) if callable(style) else style


def _name_faults(name: str, num_chunks: int) -> list[str]:
    if name not in SCHEDULES:
        return [
            f"there is no schedule {name!r}: use one of {', '.join(map(repr, SCHEDULES))}, or give your own"
        ]
    own = SCHEDULES[name].chunks
    if num_chunks < 1:
        return [f"num_model_chunks={num_chunks}: a rank has at least 1 stage"]
    if own is None or num_chunks in (1, own):
        return []
    taking = [repr(other) for other, style in SCHEDULES.items() if style.chunks is None]
    return [
        f"the schedule {name!r} has {own} {'stage' if own == 1 else 'stages'} per rank and cannot have "
        f"num_model_chunks={num_chunks}: {' and '.join(taking)} take any number"
    ]


def _refuse(faults: list[str]) -> None:
    if faults:
        raise ValueError("; ".join(faults))
