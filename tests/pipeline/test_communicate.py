"""Sends and receives added to computations: their order ends for any blocking of the transport."""

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from echelon.pipeline.action import COMPUTES, RECEIVES, SENDS, TRANSFERS, Action, Op, Schedule, counterpart
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import build_schedule, forward_only, gpipe, one_f_one_b

from .small_schedules import cases, random_schedule, written

BOTH_ORDERS = pytest.mark.parametrize("ahead", [True, False])


def schedules(ranks: int, microbatches: int, number: int) -> Iterator[Schedule]:
    """Yield all styles up to these sizes, their evaluation, and a number of random orders on random placements."""
    generator = random.Random(1)
    for name, p, m, v in cases(ranks, microbatches):
        yield (compute := build_schedule(name, p, m, v))
        yield forward_only(compute)
    for _ in range(number):
        yield random_schedule(generator)[0]


@pytest.mark.parametrize("sizes", [(4, 6, 100), pytest.param((5, 7, 200), marks=pytest.mark.slow)])
@BOTH_ORDERS
def test_transfers_have_one_order_on_both_ends_and_every_schedule_ends_in_any_timing(
    ahead: bool, sizes: tuple[int, int, int]
) -> None:
    generator = random.Random(0)
    for compute in schedules(*sizes):
        ordered = with_communication(compute, ahead=ahead)
        assert [[action for action in actions if action.op in COMPUTES] for actions in ordered] == compute
        for actions in ordered:
            assert len(actions) == len(set(actions))
            require_order(actions)
        if not ahead:  # all transfers of two ranks have the same order
            for rank, peer in combinations(range(len(ordered)), 2):
                answers = [counterpart(action) for action in transfers(ordered, peer, rank)]
                assert transfers(ordered, rank, peer) == answers
        for buffered_sends in (0, generator.randint(1, 4)):
            RandomTiming(ordered, generator, receives_block=not ahead, buffered_sends=buffered_sends).run()


def require_order(actions: list[Action]) -> None:
    """Require that results are sent directly after their computation, and gradients received after that send."""
    without_receives = [action for action in actions if action.op not in RECEIVES]
    for before, action in pairwise(without_receives):
        if action.op in SENDS:
            assert TRANSFERS[before.op].send is action.op and before[1:] == action[1:]
    places = {action: index for index, action in enumerate(actions)}
    for action, index in places.items():
        if action.op is Op.RECV_BACKWARD:
            assert places[action._replace(op=Op.SEND_FORWARD)] < index


def transfers(schedule: Schedule, rank: int, peer: int) -> list[Action]:
    there = {action.stage for action in schedule[peer] if action.op in COMPUTES}
    return [a for a in schedule[rank] if a.op not in COMPUTES and counterpart(a).stage in there]


def uses_of(actions: list[Action], receive: Action) -> tuple[int, list[Action]]:
    """Return the computations of a rank, and the index of the one that uses a received tensor."""
    computed = [action for action in actions if action.op in COMPUTES]
    kinds = [op for op, travel in TRANSFERS.items() if travel.receive is receive.op]
    (use,) = (computed.index(use) for op in kinds if (use := receive._replace(op=op)) in computed)
    return use, computed


def lead(actions: list[Action], receive: Action) -> int:
    """Return the number of computations between a receive and the one that uses it."""
    use, _ = uses_of(actions, receive)
    return use - sum(action.op in COMPUTES for action in actions[: actions.index(receive)])


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbh1"])
def test_a_receive_is_posted_two_computations_ahead_if_possible(name: str) -> None:
    """In interleaved schedules whose ranks divide the microbatches: larger groups need some earlier."""
    for style, p, m, v in cases(5, 9):
        if style != name or (name == "interleaved" and m % p):
            continue
        for actions in with_communication(build_schedule(name, p, m, v)):
            for receive in filter(lambda action: action.op in RECEIVES, actions):
                use, computed = uses_of(actions, receive)
                # Nothing runs before a rank's first computation; a gradient comes after its output was sent.
                is_answer = receive.op is Op.RECV_BACKWARD
                earliest = computed.index(receive._replace(op=Op.FORWARD)) + 1 if is_answer else 0
                assert lead(actions, receive) == min(2, use - earliest), (p, m, v, receive)


@BOTH_ORDERS
def test_receives_are_placed_as_in_schedules_written_by_hand(ahead: bool) -> None:
    expected = {
        True: (
            "0F0 0sF0 0rB0 0F1 0sF1 0rB1 0B0 0F2 0sF2 0rB2 0B1 0B2",
            "1rF0 1rF1 1F0 1B0 1sB0 1rF2 1F1 1B1 1sB1 1F2 1B2 1sB2",
        ),
        False: (
            "0F0 0sF0 0F1 0sF1 0rB0 0B0 0F2 0sF2 0rB1 0B1 0rB2 0B2",
            "1rF0 1F0 1rF1 1B0 1sB0 1F1 1rF2 1B1 1sB1 1F2 1B2 1sB2",
        ),
    }
    assert with_communication(one_f_one_b(2, 3), ahead=ahead) == written(*expected[ahead])
    compute = written("0F0 1F0 1I0 1W0 0B0")  # stages on one rank exchange nothing
    assert with_communication(compute, ahead=ahead) == compute
    turn = written("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert with_communication(turn, ahead=ahead) == written(
        "3rF0 0F0 0sF0 0rB0 3F0 3B0 3sB0 0B0" if ahead else "0F0 0sF0 3rF0 3F0 3B0 3sB0 0rB0 0B0",
        "1rF0 1F0 2F0 2sF0 2rB0 2B0 1B0 1sB0",
    )


def test_a_receive_that_a_sender_cannot_wait_for_is_posted_earlier() -> None:
    """Rank 0 sends all its activations before it receives a gradient; rank 1 uses the last ones late."""
    compute = [gpipe(2, 6)[0], one_f_one_b(2, 6)[1]]
    ordered = with_communication(compute)
    RandomTiming(ordered, random.Random(0), receives_block=False, buffered_sends=0).run()
    assert lead(ordered[1], Action(Op.RECV_FORWARD, 1, 5)) > 2
    late = [list(actions) for actions in ordered]
    late[1].remove(Action(Op.RECV_FORWARD, 1, 5))
    late[1].insert(late[1].index(Action(Op.BACKWARD, 1, 4)), Action(Op.RECV_FORWARD, 1, 5))
    with pytest.raises(AssertionError, match="0sF5"):
        RandomTiming(late, random.Random(0), receives_block=False, buffered_sends=0).run()


class RandomTiming:
    """All ranks run in random turns over channels for a few sends.

    Computations wait for received tensors, and a send waits while too many earlier ones were not received. Asserts
    that all ranks reach their ends, and that both ends of a channel have the same order.
    """

    def __init__(
        self, schedule: Schedule, generator: random.Random, *, receives_block: bool, buffered_sends: int
    ) -> None:
        self.queues = [list(actions) for actions in schedule]
        self.holders = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
        self.generator = generator
        self.receives_block = receives_block
        self.buffered_sends = buffered_sends
        self.sent: dict[tuple, list[Action]] = defaultdict(list)
        self.posted: dict[tuple, list[Action]] = defaultdict(list)

    def run(self) -> None:
        while any(self.queues):
            for head in [queue[0] for queue in self.queues if queue]:
                if head.op in RECEIVES and head not in self.posted[self.channel(head)]:
                    self.posted[self.channel(head)].append(head)
            ready = [rank for rank, queue in enumerate(self.queues) if queue and self.can_start(queue[0])]
            assert ready, self.queues
            action = self.queues[self.generator.choice(ready)].pop(0)
            if action.op in SENDS:
                self.sent[self.channel(action)].append(action)
        for channel, sent in self.sent.items():
            assert self.posted[channel] == [counterpart(action) for action in sent]

    def channel(self, action: Action) -> tuple:
        """Return the channel of a transfer, named from the sender's end."""
        send = action if action.op in SENDS else counterpart(action)
        return send.op, self.holders[send.stage], self.holders[counterpart(send).stage]

    def can_start(self, action: Action) -> bool:
        if action.op in RECEIVES:
            return not self.receives_block or self.has_arrived(action)
        if action.op in COMPUTES:
            return all(self.has_arrived(receive) for receive in self.receives_of(action))
        channel = self.channel(action)
        return len(self.sent[channel]) < len(self.posted[channel]) + self.buffered_sends

    def receives_of(self, action: Action) -> list[Action]:
        receive = action._replace(op=Op.RECV_FORWARD if action.op is Op.FORWARD else Op.RECV_BACKWARD)
        return [posted for posts in self.posted.values() for posted in posts if posted == receive]

    def has_arrived(self, receive: Action) -> bool:
        channel = self.channel(receive)
        return len(self.sent[channel]) > self.posted[channel].index(receive)
