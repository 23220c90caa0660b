"""Add sends and receives to a schedule of computations."""

from .action import TRANSFERS, Action, Op, Schedule, counterpart, inputs, result, send_of, stage_ranks

# Number of computations before the use of a tensor at which its receive is posted. With one, a sender often arrives
# before the receive, and waits: measured, a fifth of the engine's time over gloo. Four are not faster, and each needs
# a receive buffer.
_AHEAD = 2


def with_communication(compute: Schedule, *, ahead: bool = True) -> Schedule:
    """Add to each rank's computations the sends of their results and the receives of their inputs.

    Neighbouring stages on the same rank exchange nothing.

    [Note: rendezvous channels]
    Every pair of ranks has one channel per direction for activations and one for gradients; on NCCL each is
    a separate communicator. The transfers of a channel run in order, which is the same on both ends.
    A rank posts a receive and continues; the computation that uses the tensor waits for it. A send may block
    until its receive is posted, because the transport bounds what is in flight: a schedule must not rely on
    buffering. If receives block (`ahead=False`), a rank waits at them too.

    [Note: an order that cannot deadlock]
    The computations of all ranks are placed in one common order, each after its inputs; each rank's list is
    its part of that order. The send of a result follows its computation directly. The receive is placed

    - next to its send in the common order (`ahead=False`). Both ends of every pair have their transfers in the
      same order. Even if every send and receive blocked until its peer arrived, the earliest unfinished item of
      the common order could always proceed.
    - `_AHEAD` computations before the one that uses it (`ahead=True`), so that it is in flight while those run,
      and needs no memory earlier. The common order then assumes that a rank does not proceed past a send whose
      receive is not placed yet. If all ranks would wait, one such receive is placed at the current position of
      its rank, further ahead than usual. So every rank reaches its end even if every send blocks until its
      receive is posted, as long as posting does not block.

    In both cases the transfers of a channel (one pair of ranks and direction, activations or gradients) have
    the order of its sends on both ends. Gradients are received after the activations that they belong to were
    sent, since they have the same shapes.

    Args:
        compute: computations of every rank, in order.
        ahead: place receives ahead, in flight during earlier computations. Otherwise receives may block.

    Raises:
        ValueError: computations wait for each other in a cycle, or for one that no rank has; a stage is on no
            rank, or on two.
    """
    builder = _ScheduleBuilder(compute, ahead=ahead)
    while builder.advance_all() or builder.place_receive_of_waiting_send():
        pass
    builder.check_complete()
    return builder.ordered


class _ScheduleBuilder:
    """The lists of actions under construction; see [Note: an order that cannot deadlock].

    Args:
        compute: the computations of every rank, in order.
        ahead: see `with_communication`.

    Attributes:
        ordered: by rank, the actions that are placed so far.
    """

    def __init__(self, compute: Schedule, *, ahead: bool) -> None:
        self._compute = compute
        self._ahead = ahead
        self._ranks = dict(enumerate(stage_ranks(compute)))
        self._position = [0] * len(compute)  # by rank, the number of computations that are placed
        self._done: set[Action] = set()  # results of placed computations, see `action.result`
        self._awaited: dict[int, Action] = {}  # by rank: the receive for which its last send waits
        # By receive: the receives of its channel that are not placed yet.
        self._channels = self._receives_in_order_of_sends()
        self._placed: set[Action] = set()  # receives
        self.ordered: Schedule = [[] for _ in compute]

    def advance_all(self) -> bool:
        """Place the next computation of every rank that can proceed; return True if anything was placed."""
        return sum(map(self._advance, range(len(self._compute)))) > 0

    def place_receive_of_waiting_send(self) -> bool:
        """Place one receive for which a rank waits at its send; return False if there is none."""
        return any(self._place_receive(receive) for receive in self._awaited.values())

    def check_complete(self) -> None:
        """Raise ValueError, with the reasons, if some rank's computations could not all be placed."""
        descriptions = {
            result(action): f"{action} (later on rank {rank})"
            for rank, actions in enumerate(self._compute)
            for action in actions
        }
        errors = []
        for rank, (position, actions) in enumerate(zip(self._position, self._compute, strict=True)):
            if position < len(actions):
                action = actions[position]
                missing = [needed for needed in inputs(action, len(self._ranks)) if needed not in self._done]
                described = [descriptions.get(needed, f"{needed} (on no rank)") for needed in missing]
                errors.append(f"rank {rank} waits at {action}, which needs {' and '.join(described)}")
        if errors:
            raise ValueError(f"the schedule deadlocks: {'; '.join(errors)}")

    def _advance(self, rank: int) -> bool:
        """Place the rank's next computation, or receives ahead of it; return True if anything was placed."""
        if self._waits(rank):
            return False
        upcoming = self._compute[rank][self._position[rank] : self._position[rank] + 1 + _AHEAD]
        placed_receives = self._ahead and sum(map(self._place_receive_of_input, upcoming)) > 0
        if not upcoming or not self._done.issuperset(inputs(upcoming[0], len(self._ranks))):
            return placed_receives
        self._place_computation(rank, upcoming[0])
        return True

    def _waits(self, rank: int) -> bool:
        """Return True if the last action of a rank is a send whose receive is not placed yet."""
        return rank in self._awaited and self._awaited[rank] not in self._placed

    def _place_computation(self, rank: int, action: Action) -> None:
        """Place a computation and the send of its result."""
        self._position[rank] += 1
        self._done.add(result(action))
        self.ordered[rank].append(action)
        if send := send_of(action, self._ranks):
            self.ordered[rank].append(send)
            self._awaited[rank] = counterpart(send)
            if not self._ahead:
                self._place_receive(counterpart(send))

    def _receives_in_order_of_sends(self) -> dict[Action, dict[Action, None]]:
        """Return for every receive the receives of its channel in order: the keys of a dict that all of them share."""
        by_channel: dict[tuple[int, int, Op], dict[Action, None]] = {}  # by sender, receiver and op
        channels = {}
        for rank, actions in enumerate(self._compute):
            for send in filter(None, (send_of(action, self._ranks) for action in actions)):
                receive = counterpart(send)
                channels[receive] = by_channel.setdefault((rank, self._ranks[receive.stage], receive.op), {})
                channels[receive][receive] = None
        return channels

    def _place_receive_of_input(self, action: Action) -> bool:
        return action.op in TRANSFERS and self._place_receive(
            action._replace(op=TRANSFERS[action.op].receive)
        )

    def _place_receive(self, receive: Action) -> bool:
        """Place a receive, after those of its channel that must precede it; return True if any was placed."""
        channel = self._channels.get(receive, {})
        was_placed = False
        while receive in channel:
            first = next(iter(channel))
            if not self._can_place(first):
                break
            del channel[first]
            self._placed.add(first)
            rank = self._ranks[first.stage]
            # A rank that waits at its last send has not passed it: the receive is placed before this send.
            last_send = 1 if self._waits(rank) else 0
            self.ordered[rank].insert(len(self.ordered[rank]) - last_send, first)
            was_placed = True
        return was_placed

    def _can_place(self, receive: Action) -> bool:
        """Return False for a gradient whose activations are not computed and sent yet."""
        return receive.op is Op.RECV_FORWARD or receive._replace(op=Op.FORWARD) in self._done
