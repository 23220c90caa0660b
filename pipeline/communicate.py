"""Adding sends and receives to a schedule of computations. Whether a schedule can run is validate.py."""

from collections.abc import Mapping

from .action import TRAVELS, Action, Op, Schedule, counterpart, inputs, placement, result, send_of

# With one, a sender often comes before the receive was posted, and waits for word of it: measured, a fifth of an
# engine's time over gloo. Four are no better, and each holds the memory of what is to arrive.
_AHEAD = 2


def with_communication(compute: Schedule, *, ahead: bool = True) -> Schedule:
    """Add to each rank's computations the sends of their results and the receives of their inputs.

    Neighbouring stages on one rank exchange nothing.

    [Note: an order that cannot deadlock]
    The computations of all ranks are laid out in one common order in which each comes after what it needs;
    each rank's list is its part of that order. Right after a computation stands the send of its result. The
    receive stands

    - beside its send in the common order (`ahead=False`). Both ends of every pair have their transfers in one
      order, and even if every send and receive blocked until its peer arrived, the earliest item of the
      common order that is not done could always go on.
    - `_AHEAD` computations before the one that uses it (`ahead=True`), so that it travels while those run and
      takes no memory before. The common order is then made as if a rank did not go on from a
      send whose receive does not stand anywhere yet. Where this would leave all ranks waiting, one such
      receive is put where its rank stands, further ahead than that. So every rank gets to its end
      even if every send blocked until its receive was posted, as long as posting does not block.

    Either way the transfers of a channel (from one rank to another, of activations or of gradients) stand in
    the order of its sends on both ends, and gradients are received after that was sent which they answer and
    whose shapes they have.

    Args:
        compute: computations of every rank, in order.
        ahead: receives travel while the computations before run. Without it they stand where they may block.

    Raises:
        ValueError: computations wait for each other in a circle, or for one that nobody does; a stage is held
            by no rank, or by two.
    """
    layout = _Layout(compute, ahead=ahead)
    while layout.advance_all() or layout.post_for_a_waiting_send():
        pass
    layout.check_complete()
    return layout.ordered


class _Layout:
    """The lists as they grow, and where each rank stands."""

    def __init__(self, compute: Schedule, *, ahead: bool) -> None:
        self._compute = compute
        self._ahead = ahead
        self._holders = dict(enumerate(placement(compute)))
        self._position = [0] * len(compute)
        self._done: set[Action] = set()  # results
        self._awaited: dict[int, Action] = {}  # by rank, the receive that its last send waits for
        self._channels = self._receives_in_order_of_sends()  # what is left to post of a receive's channel
        self._posted: set[Action] = set()
        self.ordered: Schedule = [[] for _ in compute]

    def advance_all(self) -> bool:
        """Take every rank that can go on one computation further; whether anything was added."""
        return sum(map(self._advance, range(len(self._compute)))) > 0

    def _advance(self, rank: int) -> bool:
        if self._waits(rank):
            return False
        coming = self._compute[rank][self._position[rank] : self._position[rank] + 1 + _AHEAD]
        posted = self._ahead and sum(map(self._post_input, coming)) > 0
        if not coming or not self._done.issuperset(inputs(coming[0], len(self._holders))):
            return posted
        self._do(rank, coming[0])
        return True

    def _waits(self, rank: int) -> bool:
        """Whether the last that a rank did is a send whose receive does not stand anywhere yet."""
        return rank in self._awaited and self._awaited[rank] not in self._posted

    def post_for_a_waiting_send(self) -> bool:
        """Add the receive that some rank waits for; whether there is one."""
        return any(self._post(receive) for receive in self._awaited.values())

    def check_complete(self) -> None:
        """Raise ValueError where a rank has not got to its end."""
        heads = {
            rank: actions[at]
            for rank, (at, actions) in enumerate(zip(self._position, self._compute, strict=True))
            if at < len(actions)
        }
        if heads:
            told = _explain(heads, self._compute, self._done, len(self._holders))
            raise ValueError(f"the schedule deadlocks: {told}")

    def _do(self, rank: int, action: Action) -> None:
        self._position[rank] += 1
        self._done.add(result(action))
        self.ordered[rank].append(action)
        receive = self._receive_of(action)
        if receive is not None:
            self.ordered[rank].append(counterpart(receive))
            self._awaited[rank] = receive
            if not self._ahead:
                self._post(receive)

    def _receive_of(self, action: Action) -> Action | None:
        """Where the result of a computation arrives, if another rank needs it."""
        send = send_of(action, self._holders)
        return None if send is None else counterpart(send)

    def _receives_in_order_of_sends(self) -> dict[Action, dict[Action, None]]:
        ordered: dict[tuple[int, int, Op], dict[Action, None]] = {}
        channels = {}
        for rank, actions in enumerate(self._compute):
            for receive in filter(None, map(self._receive_of, actions)):
                channel = ordered.setdefault((rank, self._holders[receive.stage], receive.op), {})
                channel[receive] = None
                channels[receive] = channel
        return channels

    def _post_input(self, action: Action) -> bool:
        return action.op in TRAVELS and self._post(action._replace(op=TRAVELS[action.op].receive))

    def _post(self, receive: Action) -> bool:
        """Add a receive, after those whose sends come before its own; whether any was added."""
        channel = self._channels.get(receive, {})
        added = False
        while receive in channel and self._may_stand(first := next(iter(channel))):
            del channel[first]
            self._posted.add(first)
            rank = self._holders[first.stage]
            # A rank that waits at its last send has not got past it: what is to be posted now stands before.
            self.ordered[rank].insert(len(self.ordered[rank]) - self._waits(rank), first)
            added = True
        return added

    def _may_stand(self, receive: Action) -> bool:
        return receive.op is Op.RECV_FORWARD or receive._replace(op=Op.FORWARD) in self._done


def _explain(heads: Mapping[int, Action], compute: Schedule, done: set[Action], num_stages: int) -> str:
    holders = {result(action): (rank, action) for rank, actions in enumerate(compute) for action in actions}
    parts = []
    for rank, head in heads.items():
        waits = []
        for need in inputs(head, num_stages):
            if need not in done:
                holder = holders.get(need)
                waits.append(f"{holder[1]} (later on rank {holder[0]})" if holder else f"{need} (on no rank)")
        parts.append(f"rank {rank} stands at {head}, which needs {' and '.join(waits)}")
    return "; ".join(parts)
