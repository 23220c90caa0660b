"""Whether a schedule with its sends and receives can run, found out without processes."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import product

from .action import RECEIVES, SENDS, TRAVELS, Action, Op, Schedule, counterpart, stage_rank

_Channel = tuple[int, int, int]  # own rank, peer rank, step of the travel: one end of a pair's channel


def validate(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    """Refuse a schedule that would compute something else than asked for, or hang.

    Every forward and backward stands exactly once on the rank of its stage (a schedule without any backward
    is one for evaluation), every result that another rank needs is sent and received exactly once,
    everything stands after what it needs, and the whole runs to its end when transfers meet as in
    [Note: rendezvous channels].

    Args:
        schedule: the actions of every rank, in order, sends and receives included.
        num_stages: stages of the whole pipeline.
        num_microbatches: microbatches of one step.

    Raises:
        ValueError: all that is wrong, with the actions named.
    """
    faults = [*_count_faults(schedule, num_stages, num_microbatches), *_order_faults(schedule, num_stages)]
    # A deadlock is looked for only in a schedule that is otherwise whole: else it is a mere consequence.
    faults = faults or _Rendezvous(schedule).faults()
    if faults:
        raise ValueError("the schedule is not valid: " + "; ".join(faults))


def _expected(num_ranks: int, num_stages: int, num_microbatches: int, ops: Sequence[Op]) -> Iterator[Action]:
    """Everything that stands in a complete schedule."""
    for op, stage, microbatch in product(ops, range(num_stages), range(num_microbatches)):
        action = Action(op, stage, microbatch)
        yield action
        target = stage + TRAVELS[op].step
        if 0 <= target < num_stages and stage_rank(target, num_ranks) != stage_rank(stage, num_ranks):
            send = action._replace(op=TRAVELS[op].send)
            yield from (send, counterpart(send))


def _count_faults(schedule: Schedule, num_stages: int, num_microbatches: int) -> Iterator[str]:
    trains = any(action.op is Op.BACKWARD for actions in schedule for action in actions)
    ops = (Op.FORWARD, Op.BACKWARD) if trains else (Op.FORWARD,)
    present = Counter((rank, action) for rank, actions in enumerate(schedule) for action in actions)
    for action in _expected(len(schedule), num_stages, num_microbatches, ops):
        rank = stage_rank(action.stage, len(schedule))
        count = present.pop((rank, action), 0)
        if count == 0:
            yield f"rank {rank} lacks {action}"
        elif count > 1:
            yield f"rank {rank} has {action} {count} times"
    for rank, action in present:
        why = _why_unwanted(rank, action, schedule, num_stages, num_microbatches)
        yield f"rank {rank} has {action}, which {why}"


def _why_unwanted(
    rank: int, action: Action, schedule: Schedule, num_stages: int, num_microbatches: int
) -> str:
    if not 0 <= action.stage < num_stages:
        return f"names none of the stages 0 to {num_stages - 1}"
    if not 0 <= action.microbatch < num_microbatches:
        return f"names none of the microbatches 0 to {num_microbatches - 1}"
    holder = stage_rank(action.stage, len(schedule))
    return f"belongs to rank {holder}" if holder != rank else "nothing answers or needs"


def _order_faults(schedule: Schedule, num_stages: int) -> Iterator[str]:
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
    if action.op in SENDS:
        return [action._replace(op=Op.FORWARD if action.op is Op.SEND_FORWARD else Op.BACKWARD)]
    if action.op is Op.RECV_BACKWARD:  # gradients have the shapes of what the forward sent
        return [action._replace(op=Op.SEND_FORWARD)]
    if action.op in RECEIVES:
        return []
    travel = TRAVELS[action.op]
    needs = [action._replace(op=travel.receive), action._replace(stage=action.stage - travel.step)]
    return [*needs, action._replace(op=Op.FORWARD)] if action.op is Op.BACKWARD else needs


class _Rendezvous:
    """A run of all ranks over channels that hold nothing.

    [Note: rendezvous channels]
    Each pair of ranks has one channel per direction of travel (activations, gradients), as on NCCL each
    direction has its own communicator. Each end is a queue: what a rank sends or receives there is done in
    order, and a transfer happens when its send is at the head of one end and its receive at the head of the
    other. A rank waits at a send until it was received, since the transport may hold back sends: a schedule
    must not need it to buffer any. It waits at a receive of activations until they were sent, since it may
    have to learn their shapes first. It goes on after posting a receive of gradients, whose shapes it knows,
    and waits for them at the backward.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._position = [0] * len(schedule)
        self._everything = {action for actions in schedule for action in actions}
        self._posted: set[Action] = set()
        self._transferred: set[Action] = set()
        self._ends: dict[_Channel, deque[Action]] = {}

    def faults(self) -> list[str]:
        """Where every rank stands that cannot reach its end; empty when all do."""
        while any(self._advance(rank) for rank in range(len(self._schedule))):
            pass
        stuck = [
            f"rank {rank} waits at {actions[at]} for {self._explain(actions[at])}"
            for rank, (at, actions) in enumerate(zip(self._position, self._schedule, strict=True))
            if at < len(actions)
        ]
        return [f"it deadlocks: {', '.join(stuck)}"] if stuck else []

    def _advance(self, rank: int) -> bool:
        """Take a rank one action further; whether it moved."""
        if self._position[rank] == len(self._schedule[rank]):
            return False
        action = self._schedule[rank][self._position[rank]]
        if action.op not in TRAVELS:
            self._post(rank, action)
        if self._awaited(action) is not None:
            return False
        self._position[rank] += 1
        return True

    def _awaited(self, action: Action) -> Action | None:
        """The transfer that must be over before the rank goes on."""
        if action.op is Op.RECV_BACKWARD:
            return None
        transfer = action._replace(op=TRAVELS[action.op].receive) if action.op in TRAVELS else action
        return transfer if transfer in self._everything and transfer not in self._transferred else None

    def _post(self, rank: int, action: Action) -> None:
        if action in self._posted:
            return
        self._posted.add(action)
        peer, step = self._peer(action)
        own = self._ends.setdefault((rank, peer, step), deque())
        far = self._ends.setdefault((peer, rank, step), deque())
        own.append(action)
        while own and far and counterpart(own[0]) == far[0]:
            self._transferred.update((own.popleft(), far.popleft()))

    def _peer(self, action: Action) -> tuple[int, int]:
        """The rank that a transfer goes to or comes from, and the direction of travel."""
        travel = SENDS.get(action.op) or RECEIVES[action.op]
        return stage_rank(counterpart(action).stage, len(self._schedule)), travel.step

    def _explain(self, action: Action) -> str:
        awaited = self._awaited(action)
        if awaited is None:
            raise AssertionError(f"{action} waits for nothing")
        answer, (peer, step) = counterpart(awaited), self._peer(awaited)
        far_end = (peer, stage_rank(awaited.stage, len(self._schedule)), step)
        queue = self._ends.get(far_end, deque())
        behind = f", which stands behind {queue[0]}" if answer in queue and queue[0] != answer else ""
        return f"{answer} of rank {peer}{behind}"
