"""Sends and receives added to a schedule of computations."""

from .action import TRANSFERS, Action, Op, Schedule, counterpart, inputs, result, send_of, stage_ranks

# With one, a sender often comes before the receive was posted, and waits for word of it: measured, a fifth of an
# engine's time over gloo. Four are no better, and each holds the memory of what is to arrive.
_AHEAD = 2


def with_communication(compute: Schedule, *, ahead: bool = True) -> Schedule:
    """Add to each rank's computations the sends of their results and the receives of their inputs.

    Neighbouring stages on one rank exchange nothing.

    [Note: rendezvous channels]
    Every pair of ranks has a channel for each direction and for each of activations and gradients, on NCCL
    a communicator of its own. What a rank sends or receives on a channel happens in order, which is the same
    on both ends. A rank posts a receive and goes on; the computation that uses it waits for it. A rank may wait
    at a send until its receive was posted, since the transport bounds what is in flight: a schedule must not need
    it to buffer any. Where receives block (`ahead=False`), a rank waits at them too.

    [Note: an order that cannot deadlock]
    The computations of all ranks are laid out in one common order in which each comes after what it needs;
    each rank's list is its part of that order. Right after a computation stands the send of its result. The
    receive stands

    - beside its send in the common order (`ahead=False`). Both ends of every pair have their transfers in one
      order, and even if every send and receive blocked until its peer arrived, the earliest item of the
      common order that is not done could always go on.
    - `_AHEAD` computations before the one that uses it (`ahead=True`), so that it is in flight while those run and
      takes no memory before. The common order is then made as if a rank did not go on from a
      send whose receive does not stand anywhere yet. Where this would leave all ranks waiting, one such
      receive is put where its rank stands, further ahead than that. So every rank gets to its end
      even if every send blocked until its receive was posted, as long as posting does not block.

    Either way the transfers of a channel (from one rank to another, of activations or of gradients) stand in
    the order of its sends on both ends, and gradients are received after that was sent which they answer and
    whose shapes they have.

    Args:
        compute: computations of every rank, in order.
        ahead: receives are in flight while the computations before run. Without it they stand where they may block.

    Raises:
        ValueError: computations wait for each other in a circle, or for one that nobody does; a stage is on no
            rank, or on two.
    """
    layout = _Layout(compute, ahead=ahead)
    while layout.advance_all() or layout.post_for_a_waiting_send():
        pass
    layout.check_complete()
    return layout.ordered


class _Layout:
    """The lists as they grow, and the position of each rank."""

    def __init__(self, compute: Schedule, *, ahead: bool) -> None:
        self._compute = compute
        self._ahead = ahead
        self._ranks = dict(enumerate(stage_ranks(compute)))
        self._position = [0] * len(compute)
        self._done: set[Action] = set()  # results
        self._awaited: dict[int, Action] = {}  # by rank, the receive that its last send waits for
        self._channels = self._receives_in_order_of_sends()  # what is left to post of a receive's channel
        self._posted: set[Action] = set()
        self.ordered: Schedule = [[] for _ in compute]

    def advance_all(self) -> bool:
        """Take every rank that can go on one computation further; returns True if anything was added."""
        return sum(map(self._advance, range(len(self._compute)))) > 0

    def post_for_a_waiting_send(self) -> bool:
        """Add the receive that some rank waits for; returns False where there is none."""
        return any(self._post(receive) for receive in self._awaited.values())

    def check_complete(self) -> None:
        """Raise ValueError where a rank has not got to its end."""
        where = {
            result(action): (rank, action) for rank, actions in enumerate(self._compute) for action in actions
        }
        stuck = []
        for rank, (at, actions) in enumerate(zip(self._position, self._compute, strict=True)):
            if at < len(actions):
                missing = [need for need in inputs(actions[at], len(self._ranks)) if need not in self._done]
                waits = [
                    f"{where[need][1]} (later on rank {where[need][0]})"
                    if need in where
                    else f"{need} (on no rank)"
                    for need in missing
                ]
                stuck.append(f"rank {rank} stands at {actions[at]}, which needs {' and '.join(waits)}")
        if stuck:
            raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")

    def _advance(self, rank: int) -> bool:
        if self._waits(rank):
            return False
        coming = self._compute[rank][self._position[rank] : self._position[rank] + 1 + _AHEAD]
        posted = self._ahead and sum(map(self._post_input, coming)) > 0
        if not coming or not self._done.issuperset(inputs(coming[0], len(self._ranks))):
            return posted
        self._do(rank, coming[0])
        return True

    def _waits(self, rank: int) -> bool:
        """Return True if the last action of a rank is a send whose receive does not stand anywhere yet."""
        return rank in self._awaited and self._awaited[rank] not in self._posted

    def _do(self, rank: int, action: Action) -> None:
        self._position[rank] += 1
        self._done.add(result(action))
        self.ordered[rank].append(action)
        if send := send_of(action, self._ranks):
            self.ordered[rank].append(send)
            self._awaited[rank] = counterpart(send)
            if not self._ahead:
                self._post(counterpart(send))

    def _receives_in_order_of_sends(self) -> dict[Action, dict[Action, None]]:
        ordered: dict[tuple[int, int, Op], dict[Action, None]] = {}
        channels = {}
        for rank, actions in enumerate(self._compute):
            for send in filter(None, (send_of(action, self._ranks) for action in actions)):
                receive = counterpart(send)
                channels[receive] = ordered.setdefault((rank, self._ranks[receive.stage], receive.op), {})
                channels[receive][receive] = None
        return channels

    def _post_input(self, action: Action) -> bool:
        return action.op in TRANSFERS and self._post(action._replace(op=TRANSFERS[action.op].receive))

    def _post(self, receive: Action) -> bool:
        """Add a receive, after those whose sends come before its own; returns True if any was added."""
        channel = self._channels.get(receive, {})
        added = False
        while receive in channel and self._may_stand(first := next(iter(channel))):
            del channel[first]
            self._posted.add(first)
            rank = self._ranks[first.stage]
            # A rank that waits at its last send has not got past it: what is to be posted now stands before.
            self.ordered[rank].insert(len(self.ordered[rank]) - self._waits(rank), first)
            added = True
        return added

    def _may_stand(self, receive: Action) -> bool:
        return receive.op is Op.RECV_FORWARD or receive._replace(op=Op.FORWARD) in self._done
