"""Whether a schedule can run and computes what was asked for, found out without processes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from .action import (
    COMPUTES,
    RECEIVES,
    SENDS,
    TRAVELS,
    Action,
    Op,
    Schedule,
    counterpart,
    placement_faults,
    send_of,
)

_WHOLE, _PARTS = Op.BACKWARD, (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_Holders = Mapping[int, int]  # stage to rank


def validate(schedule: Schedule, num_microbatches: int, *, receives_block: bool = False) -> None:
    """Refuse a schedule that would compute something else than asked for, or hang.

    Every stage is held by one rank. Every stage and microbatch has one forward and one backward, whole or in
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
    holders = _holders(schedule)
    faults = [
        *placement_faults(schedule),
        *_mixed_faults(schedule),
        *_count_faults(schedule, holders, num_microbatches, with_transfers=True),
        *_order_faults(schedule),
    ]
    # These are looked for only in a schedule that is otherwise whole: else they are mere consequences.
    faults = faults or list(_channel_faults(schedule, holders))
    faults = faults or _Rendezvous(schedule, holders, receives_block=receives_block).faults()
    if faults:
        raise ValueError("the schedule is not valid: " + "; ".join(faults))


def computation_faults(compute: Schedule, num_microbatches: int) -> list[str]:
    """What is wrong with computations that have no sends and receives yet, but for circles between ranks."""
    holders = _holders(compute)
    return [
        *placement_faults(compute),
        *_mixed_faults(compute),
        *_count_faults(compute, holders, num_microbatches, with_transfers=False),
        *_order_faults(compute),
    ]


def _holders(schedule: Schedule) -> _Holders:
    """Who computes each stage; where two do, who computes more of it."""
    counts: dict[int, Counter[int]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op in COMPUTES:
                counts.setdefault(action.stage, Counter())[rank] += 1
    return {stage: found.most_common(1)[0][0] for stage, found in counts.items()}


def _count_faults(
    schedule: Schedule, holders: _Holders, num_microbatches: int, *, with_transfers: bool
) -> Iterator[str]:
    present = Counter((rank, action) for rank, actions in enumerate(schedule) for action in actions)
    for rank, action in _wanted(schedule, holders, num_microbatches, with_transfers=with_transfers):
        count = present.pop((rank, action), 0)
        if count == 0:
            yield f"rank {rank} lacks {action}"
        elif count > 1:
            yield f"rank {rank} has {action} {count} times"
    for rank, action in present:
        yield f"rank {rank} has {action}, which {_why_unwanted(rank, action, holders, num_microbatches)}"


def _wanted(
    schedule: Schedule, holders: _Holders, num_microbatches: int, *, with_transfers: bool
) -> Iterator[tuple[int, Action]]:
    """All that stands in a complete schedule, each with its rank."""
    backwards = _backwards(schedule)
    kinds = set().union(*backwards.values())
    usual = () if not kinds else (_WHOLE,) if _WHOLE in kinds else _PARTS
    for stage, microbatch in product(sorted(holders), range(num_microbatches)):
        ops = (Op.FORWARD, *_complete(backwards.get((stage, microbatch), ()), usual))
        places = [(holders[stage], Action(op, stage, microbatch)) for op in ops]
        if with_transfers:
            places += [transfer for _, action in places for transfer in _transfers(action, holders)]
        yield from dict.fromkeys(places)  # a backward that is done twice is still sent once


def _backwards(schedule: Schedule) -> dict[tuple[int, int], list[Op]]:
    """In which ways the backward of each stage and microbatch is there."""
    found: dict[tuple[int, int], list[Op]] = {}
    for actions in schedule:
        for op, stage, microbatch in actions:
            if op is _WHOLE or op in _PARTS:
                found.setdefault((stage, microbatch), []).append(op)
    return found


def _complete(ops: Sequence[Op], usual: Sequence[Op]) -> Sequence[Op]:
    """What a backward is made of, whichever of it is there."""
    if _WHOLE in ops:
        return ops  # with parts too it is a fault of its own
    return _PARTS if ops else usual


def _transfers(action: Action, holders: _Holders) -> list[tuple[int, Action]]:
    send = send_of(action, holders)
    if send is None:
        return []
    receive = counterpart(send)
    return [(holders[send.stage], send), (holders[receive.stage], receive)]


def _mixed_faults(schedule: Schedule) -> Iterator[str]:
    for (stage, microbatch), ops in _backwards(schedule).items():
        if _WHOLE in ops and len(set(ops)) > 1:
            told = " and ".join(repr(Action(op, stage, microbatch)) for op in dict.fromkeys(ops))
            yield f"there are {told}: a backward is done whole or in its two parts, not both"


def _why_unwanted(rank: int, action: Action, holders: _Holders, num_microbatches: int) -> str:
    if action.stage not in holders:
        return f"names none of the stages {sorted(holders)}"
    if not 0 <= action.microbatch < num_microbatches:
        return f"names none of the microbatches 0 to {num_microbatches - 1}"
    holder = holders[action.stage]
    return f"belongs to rank {holder}" if holder != rank else "nothing answers or needs"


def _order_faults(schedule: Schedule) -> Iterator[str]:
    for rank, actions in enumerate(schedule):
        everything = set(actions)
        seen: set[Action] = set()
        for action in actions:
            for need in _local_needs(action):
                if need in everything and need not in seen:
                    yield f"rank {rank} has {action} before {need}"
            seen.add(action)


def _local_needs(action: Action) -> list[Action]:
    """What must stand earlier in the same rank's list, where it stands there at all."""
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


def _channel_faults(schedule: Schedule, holders: _Holders) -> Iterator[str]:
    """Where the two ends of a channel differ; only for schedules whose sends and receives are complete."""
    sent: dict[tuple[int, int, Op], list[Action]] = {}
    received: dict[tuple[int, int, Op], list[Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op in SENDS:
                receive = counterpart(action)
                sent.setdefault((rank, holders[receive.stage], receive.op), []).append(receive)
            elif action.op in RECEIVES:
                sender = holders[counterpart(action).stage]
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
    """A run of all ranks over channels that hold nothing, of a schedule without other faults.

    [Note: rendezvous channels]
    Every pair of ranks has a channel for each direction and for each of activations and gradients, on NCCL
    a communicator of its own. What a rank sends or receives on a channel happens in order, which is the same
    on both ends. A rank posts a receive and goes on; the computation that uses it waits for it. A rank waits
    at a send until it was received, since the transport may hold back sends: a schedule must not need it to
    buffer any. Where receives block, a rank waits at them too.
    """

    def __init__(self, schedule: Schedule, holders: _Holders, *, receives_block: bool) -> None:
        self._schedule = schedule
        self._holders = holders
        self._waiting_ops = frozenset(SENDS) | (frozenset(RECEIVES) if receives_block else frozenset())
        self._position = [0] * len(schedule)
        self._received = {action for actions in schedule for action in actions if action.op in RECEIVES}
        self._reached: set[Action] = set()  # transfers whose rank has got to them

    def faults(self) -> list[str]:
        """Where every rank stands that cannot reach its end; empty when all do."""
        while sum(map(self._advance, range(len(self._schedule)))):
            pass
        stuck = [
            f"rank {rank} waits at {actions[at]} for {self._told(actions[at])}"
            for rank, (at, actions) in enumerate(zip(self._position, self._schedule, strict=True))
            if at < len(actions)
        ]
        return [f"it deadlocks: {', '.join(stuck)}"] if stuck else []

    def _advance(self, rank: int) -> bool:
        """Take a rank as far as it can go now; whether it moved."""
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
        if action.op in TRAVELS:
            receive = action._replace(op=TRAVELS[action.op].receive)
            return counterpart(receive) if receive in self._received else None
        return None

    def _told(self, action: Action) -> str:
        awaited = self._awaited(action)
        if awaited is None:
            raise AssertionError(f"{action} waits for nothing")
        return f"{awaited} of rank {self._holders[awaited.stage]}"
