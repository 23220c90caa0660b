"""Checks, without processes, that a schedule can run and computes what was asked for."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from .action import (
    COMPUTES,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Op,
    Schedule,
    counterpart,
    placement_errors,
    send_of,
)
from .communicate import with_communication

_WHOLE, _PARTS = Op.BACKWARD, (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_Ranks = Mapping[int, int]  # of each stage
_MOST_REPORTED = 20  # errors of one schedule


def validate(schedule: Schedule, num_microbatches: int, *, receives_block: bool = False) -> None:
    """Refuse a schedule that would compute something else than asked for, or hang.

    Every stage is on one rank. Every stage and microbatch has one forward and one backward, whole or in
    its two parts (a schedule without any backward is one for evaluation). Every result that another rank
    needs is sent and received exactly once, in the same order on both ends. Everything stands after what it
    needs, and the whole runs to its end when transfers meet as in [Note: rendezvous channels].

    Args:
        schedule: the actions of every rank, in order, sends and receives included.
        num_microbatches: microbatches of one step.
        receives_block: it must run also where a rank waits at every receive until it arrived.

    Raises:
        ValueError: all that is wrong, with the actions named.
    """
    ranks = _ranks(schedule)
    errors = _action_errors(schedule, ranks, num_microbatches, with_transfers=True)
    # These are looked for only in a schedule that is otherwise right: else they are mere consequences.
    errors = errors or list(_channel_errors(schedule, ranks))
    errors = errors or _Rendezvous(schedule, ranks, receives_block=receives_block).errors()
    if errors:
        raise ValueError("the schedule is not valid: " + "; ".join(errors))


def computation_errors(compute: Schedule, num_microbatches: int) -> list[str]:
    """All that is wrong with computations that have no sends and receives yet, but for circles between ranks."""
    return _action_errors(compute, _ranks(compute), num_microbatches, with_transfers=False)


def own_schedule_errors(
    schedule: Schedule, num_ranks: int, num_microbatches: int | None, num_chunks: int
) -> list[str]:
    """All that is wrong with computations that a user wrote; empty if nothing is.

    Args:
        schedule: anything that was given as one.
        num_ranks: pipeline ranks.
        num_microbatches: of one step; None: those that the schedule has.
        num_chunks: stages per rank; 1: those that the schedule has.
    """
    if errors := _form_errors(schedule):
        return errors
    own_microbatches = 1 + max(action.microbatch for actions in schedule for action in actions)
    num_microbatches = num_microbatches or own_microbatches
    errors = _size_errors(schedule, num_ranks, (own_microbatches, num_microbatches), num_chunks)
    if errors:
        return errors
    if errors := computation_errors(schedule, num_microbatches):
        more = [f"and {len(errors) - _MOST_REPORTED} more"] if len(errors) > _MOST_REPORTED else []
        return [f"the schedule is not valid: {'; '.join([*errors[:_MOST_REPORTED], *more])}"]
    try:
        validate(with_communication(schedule), num_microbatches)
    except ValueError as error:
        return [str(error)]
    return []


def _form_errors(schedule: Schedule) -> list[str]:
    if not isinstance(schedule, list) or not all(isinstance(actions, list) for actions in schedule):
        return [f"a schedule is a list with a list of actions for every rank, not {schedule!r:.100}"]
    every = [action for actions in schedule for action in actions]
    for action in every:
        if not (
            isinstance(action, Action)
            and isinstance(action.op, Op)
            and isinstance(action.stage, int)
            and isinstance(action.microbatch, int)
        ):
            # An Action of other things cannot print itself.
            found = tuple(action) if isinstance(action, tuple) else action
            return [f"a schedule is made of Action(Op, stage, microbatch), and it has {found!r:.100}"]
        if not (0 <= action.stage < len(every) and 0 <= action.microbatch < len(every)):
            return [
                f"the schedule's {len(every)} actions cannot have so many stages or microbatches: {action!r}"
            ]
    errors = []
    if transfers := [action for action in every if action.op not in COMPUTES]:
        errors.append(f"the schedule has {transfers[0]}: leave sends and receives out, they are added")
    if all(action.op is Op.FORWARD for action in every):
        errors.append(
            "the schedule has no backward: write the one for training, evaluation takes its forwards"
        )
    return errors


def _size_errors(
    schedule: Schedule, num_ranks: int, microbatches: tuple[int, int], num_chunks: int
) -> list[str]:
    errors = []
    if len(schedule) != num_ranks:
        errors.append(f"the schedule is for {len(schedule)} ranks, and the pipeline has {num_ranks}")
    own, asked = microbatches
    if own != asked:
        errors.append(
            f"the schedule is for {own} microbatches, and a step has {asked}: "
            "give a function of the numbers of ranks and of microbatches where they vary"
        )
    stages = [len({action.stage for action in actions}) for actions in schedule]
    errors += [
        f"the schedule gives rank {rank} nothing to do" for rank, count in enumerate(stages) if not count
    ]
    if num_chunks != 1 and set(stages) != {num_chunks}:
        errors.append(
            f"num_model_chunks={num_chunks}, and the schedule's ranks have {stages} stages: leave it out"
        )
    return errors


def _ranks(schedule: Schedule) -> _Ranks:
    """The rank that computes each stage; where two do, the one that computes more of it."""
    counts: dict[int, Counter[int]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op in COMPUTES:
                counts.setdefault(action.stage, Counter())[rank] += 1
    return {stage: found.most_common(1)[0][0] for stage, found in counts.items()}


def _action_errors(
    schedule: Schedule, ranks: _Ranks, num_microbatches: int, *, with_transfers: bool
) -> list[str]:
    """Stages on no rank or two, actions that are missing, too many, or before what they need."""
    backwards: dict[tuple[int, int], set[Op]] = {}  # the kinds that each stage and microbatch has
    for op, stage, microbatch in (action for actions in schedule for action in actions):
        if op is _WHOLE or op in _PARTS:
            backwards.setdefault((stage, microbatch), set()).add(op)
    mixed = [
        f"there are {' and '.join(repr(Action(op, *place)) for op in (_WHOLE, *_PARTS) if op in ops)}: "
        "a backward is done whole or in its two parts, not both"
        for place, ops in backwards.items()
        if _WHOLE in ops and len(ops) > 1
    ]
    wanted = _wanted(ranks, num_microbatches, backwards, with_transfers=with_transfers)
    return [
        *placement_errors(schedule),
        *mixed,
        *_count_errors(schedule, wanted, ranks, num_microbatches),
        *_order_errors(schedule),
    ]


def _wanted(
    ranks: _Ranks,
    num_microbatches: int,
    backwards: Mapping[tuple[int, int], set[Op]],
    *,
    with_transfers: bool,
) -> Iterator[tuple[int, Action]]:
    """All that stands in a complete schedule, each with its rank."""
    kinds = set().union(*backwards.values())
    usual: Sequence[Op] = () if not kinds else (_WHOLE,) if _WHOLE in kinds else _PARTS
    for stage, microbatch in product(sorted(ranks), range(num_microbatches)):
        found = backwards.get((stage, microbatch), set())
        # With parts beside a whole one it is an error of its own.
        backward = sorted(found, key=lambda op: op.value) if _WHOLE in found else _PARTS if found else usual
        actions = [Action(op, stage, microbatch) for op in (Op.FORWARD, *backward)]
        places = [(ranks[stage], action) for action in actions]
        for send in filter(None, (send_of(action, ranks) for action in actions if with_transfers)):
            receive = counterpart(send)
            places += [(ranks[send.stage], send), (ranks[receive.stage], receive)]
        yield from dict.fromkeys(places)  # a backward that is done twice is still sent once


def _count_errors(
    schedule: Schedule, wanted: Iterator[tuple[int, Action]], ranks: _Ranks, num_microbatches: int
) -> Iterator[str]:
    present = Counter((rank, action) for rank, actions in enumerate(schedule) for action in actions)
    for rank, action in wanted:
        count = present.pop((rank, action), 0)
        if count == 0:
            yield f"rank {rank} lacks {action}"
        elif count > 1:
            yield f"rank {rank} has {action} {count} times"
    for rank, action in present:
        if action.stage not in ranks:
            why = f"names none of the stages {sorted(ranks)}"
        elif not 0 <= action.microbatch < num_microbatches:
            why = f"names none of the microbatches 0 to {num_microbatches - 1}"
        elif ranks[action.stage] != rank:
            why = f"belongs to rank {ranks[action.stage]}"
        else:
            why = "nothing answers or needs"
        yield f"rank {rank} has {action}, which {why}"


def _order_errors(schedule: Schedule) -> Iterator[str]:
    for rank, actions in enumerate(schedule):
        every = set(actions)
        seen: set[Action] = set()
        for action in actions:
            for need in _local_needs(action):
                if need in every and need not in seen:
                    yield f"rank {rank} has {action} before {need}"
            seen.add(action)


def _local_needs(action: Action) -> list[Action]:
    """Actions that must stand earlier in the same rank's list, where they stand there at all."""
    match action.op:
        case Op.FORWARD:
            return [action._replace(op=Op.RECV_FORWARD), action._replace(stage=action.stage - 1)]
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            own = [action._replace(op=op) for op in (Op.RECV_BACKWARD, Op.FORWARD)]
            return own + [Action(op, action.stage + 1, action.microbatch) for op in (_WHOLE, _PARTS[0])]
        case Op.BACKWARD_WEIGHT:
            return [action._replace(op=Op.BACKWARD_INPUT)]
        case Op.SEND_FORWARD:
            return [action._replace(op=Op.FORWARD)]
        case Op.SEND_BACKWARD:
            return [action._replace(op=op) for op in (_WHOLE, _PARTS[0])]
        case Op.RECV_BACKWARD:  # gradients have the shapes of what the forward sent
            return [action._replace(op=Op.SEND_FORWARD)]
        case _:
            return []


def _channel_errors(schedule: Schedule, ranks: _Ranks) -> Iterator[str]:
    """Channels whose two ends differ; only for schedules whose sends and receives are complete."""
    sent: dict[tuple[int, int, Op], list[Action]] = {}
    received: dict[tuple[int, int, Op], list[Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op in SENDS:
                receive = counterpart(action)
                sent.setdefault((rank, ranks[receive.stage], receive.op), []).append(receive)
            elif action.op in RECEIVES:
                sender = ranks[counterpart(action).stage]
                received.setdefault((sender, rank, action.op), []).append(action)
    for channel, ordered in sent.items():
        for expected, found in zip(ordered, received[channel], strict=True):
            if expected != found:
                yield (
                    f"rank {channel[1]} has {found} where rank {channel[0]} has {counterpart(expected)}: "
                    "both ends of a channel must have one order"
                )
                break


class _Rendezvous:
    """A run of all ranks over channels that hold nothing, of a schedule without other errors.

    [Note: rendezvous channels]
    Every pair of ranks has a channel for each direction and for each of activations and gradients, on NCCL
    a communicator of its own. What a rank sends or receives on a channel happens in order, which is the same
    on both ends. A rank posts a receive and goes on; the computation that uses it waits for it. A rank waits
    at a send until it was received, since the transport may hold back sends: a schedule must not need it to
    buffer any. Where receives block, a rank waits at them too.
    """

    def __init__(self, schedule: Schedule, ranks: _Ranks, *, receives_block: bool) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._waiting_ops = frozenset(SENDS) | (frozenset(RECEIVES) if receives_block else frozenset())
        self._position = [0] * len(schedule)
        self._received = {action for actions in schedule for action in actions if action.op in RECEIVES}
        self._reached: set[Action] = set()  # transfers whose rank has got to them

    def errors(self) -> list[str]:
        """The position of every rank that cannot reach its end; empty when all do."""
        while sum(map(self._advance, range(len(self._schedule)))):
            pass
        stuck = []
        for rank, (at, actions) in enumerate(zip(self._position, self._schedule, strict=True)):
            if at < len(actions):
                awaited = self._awaited(actions[at])
                assert awaited is not None, f"{actions[at]} waits for nothing"
                stuck.append(
                    f"rank {rank} waits at {actions[at]} for {awaited} of rank {self._ranks[awaited.stage]}"
                )
        return [f"it deadlocks: {', '.join(stuck)}"] if stuck else []

    def _advance(self, rank: int) -> bool:
        """Take a rank as far as it can go now; returns True if it moved."""
        actions, start = self._schedule[rank], self._position[rank]
        for at in range(start, len(actions)):
            if actions[at].op not in COMPUTES:
                self._reached.add(actions[at])
            awaited = self._awaited(actions[at])
            if awaited is not None and awaited not in self._reached:
                self._position[rank] = at
                return at > start
        self._position[rank] = len(actions)
        return len(actions) > start

    def _awaited(self, action: Action) -> Action | None:
        """The transfer at whose rank's end something must have been reached before this rank goes on."""
        if action.op in self._waiting_ops:
            return counterpart(action)
        if action.op in TRANSFERS:
            receive = action._replace(op=TRANSFERS[action.op].receive)
            return counterpart(receive) if receive in self._received else None
        return None
