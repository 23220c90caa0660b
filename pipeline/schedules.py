"""Pipeline schedules as data: GPipe, 1F1B, interleaved, ZB-H1, ZB-V, and user-defined lists.

Every schedule is a function of the number of pipeline ranks p and the number of microbatches m. All numbers are
allowed, also fewer microbatches than ranks. A bubble is idle time divided by work. communicate.py adds sends and
receives.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from .action import Action, Op, Schedule, stage_ranks
from .validate import user_schedule_errors

_F, _B, _I, _W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT

Step = tuple[Op, int]  # an action without numbers: its kind, and the index of a chunk of the rank, from 0
UserSchedule = Schedule | Callable[[int, int], Schedule]  # a function of num_ranks and num_microbatches


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (arXiv:1811.06965).

    With v chunks per rank, assigned round-robin, the bubble is (p - 1) / (v m) for m >= p; every rank keeps the
    activations of all m microbatches.
    """
    _check_sizes(num_ranks, num_microbatches, num_chunks)
    chunks = range(num_chunks)
    forwards = [(_F, chunk) for chunk in chunks for _ in range(num_microbatches)]
    backwards = [(_B, chunk) for chunk in reversed(chunks) for _ in range(num_microbatches)]
    return [
        _numbered(forwards + backwards, _round_robin_stages(rank, num_ranks, num_chunks), num_microbatches)
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """The shortest warm-up that keeps the last rank busy, then alternating forwards and backwards (arXiv:2006.09503).

    The bubble is that of GPipe; rank r keeps the activations of at most p - r microbatches.
    """
    return interleaved(num_ranks, num_microbatches, 1)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over v chunks per rank, assigned round-robin (arXiv:2104.04473, figure 4). With one chunk it is 1F1B.

    Microbatches pass through the chunks in groups of g: groups of p if p divides m, else the most equal groups of
    at least p. The bubble is (p - 1) / (v m) for m >= p, even if p does not divide m. Rank r keeps the
    activations of at most (v - 1) g + 2 (p - r) - 1 chunks. For g = p these are, on the first rank,
    p (1 + (p - 1) / (p v)) times those of one microbatch in all its chunks.

    If p does not divide m, groups of p and a smaller last group would need less memory, but a group smaller than p
    waits at each of its chunks. For all p to 8, m to 24 and v to 4 with m > p such orders have on average twice this
    bubble (up to 4.5 times) or deadlock; they keep 1.25 p microbatches, this order 1.5 p (at most 1.9 p).
    """
    _check_sizes(num_ranks, num_microbatches, num_chunks)
    # The largest group first: its warm-up suffices for the others.
    count = max(1, num_microbatches // num_ranks)
    groups = [num_microbatches // count + (index < num_microbatches % count) for index in range(count)]
    chunks = [chunk for size in groups for chunk in range(num_chunks) for _ in range(size)]
    forwards = [(_F, chunk) for chunk in chunks]
    backwards = [(_B, num_chunks - 1 - chunk) for chunk in chunks]
    schedule = []
    for rank in range(num_ranks):
        num_later = num_ranks - 1 - rank  # ranks after this one
        warmup = num_later if num_chunks == 1 else 2 * num_later + (num_chunks - 1) * groups[0]
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        steps = [*forwards[:warmup], *steady, *backwards[len(forwards[warmup:]) :]]
        schedule.append(_numbered(steps, _round_robin_stages(rank, num_ranks, num_chunks), num_microbatches))
    return schedule


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B in which rank r computes weight gradients r microbatches late: ZB-H1 of arXiv:2401.10241.

    Every rank idles for (p - 1) (F + I - W), if there are at least p microbatches and W is not longer than F
    or I. In 1F1B it idles for (p - 1) (F + I + W): three times as long if all are equal. Every rank keeps the
    activations of at most p microbatches, like the first rank in 1F1B.
    """
    _check_sizes(num_ranks, num_microbatches)
    schedule = []
    for rank in range(num_ranks):
        warmup = [_F] * (num_ranks - 1 - rank)
        deferring = [_F, _I] * rank
        steady = [_F, _I, _W] * num_microbatches
        steps = [(op, 0) for op in warmup + deferring + steady]
        schedule.append(_numbered(steps, [rank], num_microbatches))
    return schedule


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two chunks per rank, placed in the shape of a V: ZB-V of arXiv:2401.10241.

    Stage s is on rank s in the first half of the stages and on rank 2p - 1 - s in the second. So the first rank also
    has the last stage, and the backward of a microbatch starts on the rank where its forward started. If F = I = W
    and there are at least 2p - 1 microbatches, no rank idles between its first and its last computation. Every
    rank keeps the activations of at most 2p chunks, that is of p microbatches, like the first rank in 1F1B.
    """
    _check_sizes(num_ranks, num_microbatches)
    down, up = 0, 1  # the chunks on the two sides of the V
    # Empty with fewer microbatches than ranks. The published schedule for 2p - 1 microbatches, without those beyond
    # m, is 5 % longer for m < 2p - 1 (p to 16, F = 1, I = 1.2, W = 0.8).
    steady = [(op, chunk) for chunk in (down, up) for op in (_F, _I, _W)] * (num_microbatches - num_ranks)
    schedule = []
    for rank in range(num_ranks):
        distance = num_ranks - rank  # ranks from this one to the tip of the V, both included
        fill = [(_F, down)] * (2 * distance - 1) + [(_F, up), (_F, down)] * rank
        first_backwards = [(_F, up), (_I, up), (_W, up)] * distance
        drain = [(_I, down), (_I, up)] * rank + [(_I, down), (_W, down)] * distance
        deferred = [(_W, up)] * rank + [(_W, down)] * rank
        steps = fill + first_backwards + steady + drain + deferred
        schedule.append(_numbered(steps, [rank, 2 * num_ranks - 1 - rank], num_microbatches))
    return schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, for evaluation, without sends and receives."""
    return [[action for action in actions if action.op is _F] for actions in schedule]


def _numbered(steps: Sequence[Step], stages: Sequence[int], num_microbatches: int) -> list[Action]:
    """Number the steps of one rank: the n-th step of an op and chunk is that of microbatch n.

    Steps for microbatches beyond the last are left out. So a pattern may repeat until only the steps remain that
    the last microbatches still need.

    Args:
        steps: the steps of the rank, in order.
        stages: the rank's stages, by chunk.
        num_microbatches: microbatches of the training step.
    """
    next_microbatch: Counter[Step] = Counter()
    actions = []
    for op, chunk in steps:
        if next_microbatch[op, chunk] < num_microbatches:
            actions.append(Action(op, stages[chunk], next_microbatch[op, chunk]))
            next_microbatch[op, chunk] += 1
    return actions


def _check_sizes(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    sizes = {"pipeline ranks": num_ranks, "microbatches": num_microbatches, "chunks per rank": num_chunks}
    errors = [f"{size} {noun}" for noun, size in sizes.items() if size < 1]
    if errors:
        raise ValueError(f"a schedule cannot have {' and '.join(errors)}: each must be at least 1")


def _round_robin_stages(rank: int, num_ranks: int, num_chunks: int) -> list[int]:
    """Return the stages of a rank, by chunk."""
    return [chunk * num_ranks + rank for chunk in range(num_chunks)]


@dataclass(frozen=True, kw_only=True)
class Style:
    """A named schedule.

    Args:
        build: from the numbers of ranks, microbatches and chunks per rank to the computations. A schedule with a
            fixed number of chunks ignores the third.
        chunks: fixed number of chunks per rank; None: as requested.
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
    num_microbatches: int | None,
    num_chunks: int,
    *,
    required_stage_ranks: Sequence[int] | None = None,
) -> Schedule:
    """Build the computations of every rank.

    Args:
        style: one of `SCHEDULES`, or a user-defined schedule: its computations, or a function of the numbers of
            ranks and microbatches that returns them.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of one step; None if not known yet: those of a given list, else 2p, which
            suits the requirements of most functions.
        num_chunks: stages per rank; 1 is also allowed if the style has another fixed number.
        required_stage_ranks: the rank of each stage, which a user's function must reproduce; None allows any.

    Raises:
        ValueError: the name or its number of chunks is wrong. A user-defined schedule cannot run, is for another
            number of microbatches, places stages depending on that number, or contains sends or receives.
    """
    if isinstance(style, str):
        return _style_of(style, num_chunks).build(num_ranks, num_microbatches or 2 * num_ranks, num_chunks)
    if not callable(style):
        schedule = style
    else:
        num_microbatches = num_microbatches or 2 * num_ranks
        try:
            schedule = style(num_ranks, num_microbatches)
        except Exception as error:
            raise ValueError(
                f"the schedule's function fails for {num_ranks} ranks and {num_microbatches} microbatches: "
                f"{type(error).__name__}: {error}"
            ) from error
    if errors := user_schedule_errors(schedule, num_ranks, num_microbatches, num_chunks):
        raise ValueError("; ".join(errors))
    if required_stage_ranks is not None and stage_ranks(schedule) != tuple(required_stage_ranks):
        raise ValueError(
            f"the schedule's function places the stages on ranks {stage_ranks(schedule)} for {num_microbatches} "
            f"microbatches, but the model was cut for {tuple(required_stage_ranks)}: placement must not depend on "
            "the number of microbatches"
        )
    return schedule


def build_stage_ranks(
    style: str | UserSchedule, num_ranks: int, num_chunks: int, num_microbatches: int | None = None
) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, which must not depend on the number of microbatches.

    Raises:
        ValueError: as in `build_schedule`.
    """
    return stage_ranks(build_schedule(style, num_ranks, num_microbatches, num_chunks))


def splits_backward(style: str | UserSchedule, num_ranks: int, num_microbatches: int | None = None) -> bool:
    """Return True if a schedule without `style_errors` computes weight gradients separately."""
    schedule = build_schedule(style, num_ranks, num_microbatches, 1)
    return any(action.op is _W for actions in schedule for action in actions)


def style_errors(
    style: str | UserSchedule, num_chunks: int, num_ranks: int, num_microbatches: int | None = None
) -> list[str]:
    """Return all errors of a choice of schedule; empty if there are none. Arguments as for `build_schedule`."""
    try:
        build_schedule(style, num_ranks, num_microbatches, num_chunks)
    except ValueError as error:
        return [str(error)]
    return []


def _style_of(name: str, num_chunks: int) -> Style:
    """Return the style of this name; raise ValueError if there is none, or it cannot have so many chunks."""
    if name not in SCHEDULES:
        raise ValueError(
            f"there is no schedule {name!r}: use one of {', '.join(map(repr, SCHEDULES))}, or give your own"
        )
    fixed_chunks = SCHEDULES[name].chunks
    if num_chunks < 1:
        raise ValueError(f"num_model_chunks={num_chunks}: a rank has at least 1 stage")
    if fixed_chunks not in (None, num_chunks) and num_chunks != 1:
        flexible = [repr(other) for other, style in SCHEDULES.items() if style.chunks is None]
        raise ValueError(
            f"the schedule {name!r} has {fixed_chunks} {'stage' if fixed_chunks == 1 else 'stages'} per rank and "
            f"cannot have num_model_chunks={num_chunks}: {' and '.join(flexible)} take any number"
        )
    return SCHEDULES[name]
