"""Schedules, their sends and receives, and what the validator makes of broken ones; nothing is run."""

import random
from itertools import product

import pytest

from echelon.pipeline.action import COMPUTES, RECEIVES, SENDS, Action, Op, Schedule, counterpart
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import SCHEDULES, forward_only, gpipe, one_f_one_b
from echelon.pipeline.validate import validate

from .sequential import is_valid, shuffled

SIZES = list(product(range(1, 7), range(1, 13)))


def full(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    return with_communication(SCHEDULES[name](num_ranks, num_microbatches), num_ranks)


def interleaved_by_hand() -> Schedule:
    """Two ranks with two stages each and two microbatches: each rank both sends to and receives from the
    other in one direction."""
    text = [["0F0", "0F1", "2F0", "2F1", "2B1", "2B0", "0B1", "0B0"]]
    text += [["1F0", "1F1", "3F0", "3F1", "3B1", "3B0", "1B1", "1B0"]]
    return [[parsed(action) for action in actions] for actions in text]


def test_an_action_prints_as_stage_op_microbatch() -> None:
    assert repr(Action(Op.FORWARD, 2, 3)) == "2F3"
    assert repr([Action(Op.BACKWARD, 0, 1), Action(Op.RECV_BACKWARD, 0, 1)]) == "[0B1, 0rB1]"


def test_gpipe_runs_all_forwards_before_all_backwards() -> None:
    assert repr(gpipe(2, 3)) == "[[0F0, 0F1, 0F2, 0B0, 0B1, 0B2], [1F0, 1F1, 1F2, 1B0, 1B1, 1B2]]"


def test_one_f_one_b_alternates_after_its_warmup() -> None:
    assert repr(one_f_one_b(3, 4)) == (
        "[[0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3],"
        " [1F0, 1F1, 1B0, 1F2, 1B1, 1F3, 1B2, 1B3],"
        " [2F0, 2B0, 2F1, 2B1, 2F2, 2B2, 2F3, 2B3]]"
    )


def test_one_f_one_b_works_with_fewer_microbatches_than_stages() -> None:
    assert repr(one_f_one_b(4, 1)) == "[[0F0, 0B0], [1F0, 1B0], [2F0, 2B0], [3F0, 3B0]]"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(0, 1), (1, 0), (-1, 4)])
def test_sizes_below_one_are_refused(name: str, num_ranks: int, num_microbatches: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        SCHEDULES[name](num_ranks, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_valid_in_training_and_evaluation(name: str) -> None:
    for num_ranks, num_microbatches in SIZES:
        schedule = full(name, num_ranks, num_microbatches)
        validate(schedule, num_ranks, num_microbatches)
        validate(forward_only(schedule), num_ranks, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_communication_keeps_the_order_of_computations(name: str) -> None:
    for num_ranks, num_microbatches in SIZES:
        compute = SCHEDULES[name](num_ranks, num_microbatches)
        ordered = with_communication(compute, num_ranks)
        assert [[action for action in actions if action.op in COMPUTES] for actions in ordered] == compute


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_peers_have_all_their_transfers_in_one_order(name: str) -> None:
    for num_ranks, num_microbatches in SIZES:
        schedule = full(name, num_ranks, num_microbatches)
        for rank in range(num_ranks - 1):
            assert transfers(schedule, rank, rank + 1) == [
                counterpart(action) for action in transfers(schedule, rank + 1, rank)
            ]


def transfers(schedule: Schedule, rank: int, peer: int) -> list[Action]:
    actions = [action for action in schedule[rank] if action.op not in COMPUTES]
    return [action for action in actions if counterpart(action).stage % len(schedule) == peer]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_hangs_even_where_every_send_and_receive_blocks(name: str) -> None:
    for num_ranks, num_microbatches in SIZES:
        queues = [list(reversed(actions)) for actions in full(name, num_ranks, num_microbatches)]
        moved = True
        while moved:
            moved = False
            for queue in queues:
                while queue and queue[-1].op in COMPUTES:
                    queue.pop()
                    moved = True
            heads = {queue[-1]: queue for queue in queues if queue}
            for head, queue in heads.items():
                if counterpart(head) in heads and queue[-1:] == [head]:
                    queue.pop()
                    heads[counterpart(head)].pop()
                    moved = True
        assert not any(queues)


def test_stages_on_one_rank_exchange_nothing() -> None:
    compute = [[parsed(action) for action in ("0F0", "1F0", "1B0", "0B0")]]
    assert with_communication(compute, 2) == compute
    validate(compute, 2, 1)


def test_two_stages_per_rank_are_valid() -> None:
    validate(with_communication(interleaved_by_hand(), 4), 4, 2)


def test_a_circle_of_waiting_is_refused_with_its_actions() -> None:
    compute = one_f_one_b(2, 2)
    compute[0] = [compute[0][index] for index in (0, 2, 1, 3)]  # 0F0 0B0 0F1 0B1: fine
    with_communication(compute, 2)
    compute[1] = [compute[1][index] for index in (0, 2, 1, 3)]  # 1F0 1F1 1B0 1B1: 1F1 needs 0F1 needs 1B0
    with pytest.raises(
        ValueError, match=r"rank 0 stands at 0B0, which needs 1B0 \(later on rank 1\); rank 1 stands at 1F1"
    ):
        with_communication(compute, 2)


def test_a_need_that_nobody_computes_is_refused() -> None:
    compute = gpipe(2, 2)
    compute[0].remove(Action(Op.FORWARD, 0, 1))
    with pytest.raises(ValueError, match=r"rank 1 stands at 1F1, which needs 0F1 \(on no rank\)"):
        with_communication(compute, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 3), (2, 3), (3, 2), (4, 5)])
def test_every_dropped_action_is_found_and_named(name: str, num_ranks: int, num_microbatches: int) -> None:
    whole = full(name, num_ranks, num_microbatches)
    for rank, actions in enumerate(whole):
        for index, action in enumerate(actions):
            broken = [list(others) for others in whole]
            del broken[rank][index]
            with pytest.raises(ValueError, match=f"rank {rank} lacks {action}"):
                validate(broken, num_ranks, num_microbatches)


@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 3), (3, 2)])
def test_every_repeated_action_is_found_and_named(num_ranks: int, num_microbatches: int) -> None:
    whole = full("1f1b", num_ranks, num_microbatches)
    for rank, actions in enumerate(whole):
        for index, action in enumerate(actions):
            broken = [list(others) for others in whole]
            broken[rank].insert(index, action)
            with pytest.raises(ValueError, match=f"rank {rank} has {action} 2 times"):
                validate(broken, num_ranks, num_microbatches)


def test_an_action_on_the_wrong_rank_is_found() -> None:
    broken = full("1f1b", 3, 2)
    broken[0].append(broken[2].pop())
    with pytest.raises(ValueError, match=r"rank 2 lacks 2sB1; rank 0 has 2sB1, which belongs to rank 2"):
        validate(broken, 3, 2)


def test_a_stage_nobody_holds_is_found() -> None:
    with pytest.raises(ValueError, match="rank 0 lacks 2F0"):
        validate(full("1f1b", 2, 1), 3, 1)
    with pytest.raises(ValueError, match="rank 1 has 1F0, which names none of the stages 0 to 0"):
        validate(full("1f1b", 2, 1), 1, 1)
    with pytest.raises(ValueError, match="rank 0 has 0F1, which names none of the microbatches 0 to 0"):
        validate(full("1f1b", 2, 2), 2, 1)


def test_all_faults_are_told_at_once() -> None:
    broken = full("gpipe", 2, 2)
    broken[0].remove(Action(Op.BACKWARD, 0, 1))
    broken[1].remove(Action(Op.RECV_FORWARD, 1, 0))
    with pytest.raises(ValueError, match=r"lacks 1rF0.*lacks 0B1"):
        validate(broken, 2, 2)


def swapped(schedule: Schedule, rank: int, first: Action, second: Action) -> Schedule:
    actions = list(schedule[rank])
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = actions[j], actions[i]
    return [actions if index == rank else others for index, others in enumerate(schedule)]


def test_a_backward_before_its_forward_is_found() -> None:
    broken = swapped(full("gpipe", 1, 2), 0, Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 0, 1))
    with pytest.raises(ValueError, match="rank 0 has 0B1 before 0F1"):
        validate(broken, 1, 2)


@pytest.mark.parametrize(
    "rank, first, second, fault",
    [
        (0, (Op.FORWARD, 0, 0), (Op.SEND_FORWARD, 0, 0), "has 0sF0 before 0F0"),
        (1, (Op.RECV_FORWARD, 1, 0), (Op.FORWARD, 1, 0), "has 1F0 before 1rF0"),
        (0, (Op.RECV_BACKWARD, 0, 1), (Op.BACKWARD, 0, 1), "has 0B1 before 0rB1"),
        (0, (Op.RECV_BACKWARD, 0, 0), (Op.SEND_FORWARD, 0, 0), "has 0rB0 before 0sF0"),
    ],
)
def test_an_action_before_what_it_needs_is_found(rank: int, first: tuple, second: tuple, fault: str) -> None:
    broken = swapped(full("1f1b", 2, 2), rank, Action(*first), Action(*second))
    with pytest.raises(ValueError, match=f"rank {rank} {fault}"):
        validate(broken, 2, 2)


def test_transfers_in_another_order_on_one_peer_are_a_deadlock() -> None:
    broken = swapped(full("gpipe", 2, 2), 0, Action(Op.SEND_FORWARD, 0, 0), Action(Op.SEND_FORWARD, 0, 1))
    broken = swapped(broken, 0, Action(Op.FORWARD, 0, 1), Action(Op.SEND_FORWARD, 0, 1))
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 waits at 0sF1 for 1rF1 of rank 1"):
        validate(broken, 2, 2)


def test_equal_orders_per_pair_that_wait_in_a_circle_are_a_deadlock() -> None:
    """Each pair and direction agrees, and yet both ranks send first: neither gets to its receive."""
    text = [["0F0", "0sF0", "0F1", "0sF1", "0rB0", "0B0", "0rB1", "0B1"]]
    text += [["1rF0", "1F0", "1B0", "1sB0", "1rF1", "1F1", "1B1", "1sB1"]]
    with pytest.raises(
        ValueError, match="rank 0 waits at 0sF1 for 1rF1 of rank 1, rank 1 waits at 1sB0 for 0rB0"
    ):
        validate([[parsed(action) for action in actions] for actions in text], 2, 2)


def test_receives_may_be_posted_ahead() -> None:
    text = [["0F0", "0sF0", "0rB0", "0F1", "0sF1", "0B0", "0rB1", "0B1"]]
    text += [["1rF0", "1F0", "1rF1", "1B0", "1sB0", "1F1", "1B1", "1sB1"]]
    validate([[parsed(action) for action in actions] for actions in text], 2, 2)


def test_a_receive_before_what_makes_its_sender_go_on_is_a_deadlock() -> None:
    """Rank 1 may have to learn the shapes of microbatch 1 from rank 0, which first waits for a gradient."""
    text = [["0F0", "0sF0", "0rB0", "0B0", "0F1", "0sF1", "0rB1", "0B1"]]
    text += [["1rF0", "1F0", "1rF1", "1B0", "1sB0", "1F1", "1B1", "1sB1"]]
    with pytest.raises(
        ValueError, match="rank 0 waits at 0B0 for 1sB0 of rank 1, rank 1 waits at 1rF1 for 0sF1"
    ):
        validate([[parsed(action) for action in actions] for actions in text], 2, 2)


def parsed(text: str) -> Action:
    return Action(Op(text[1:-1]), int(text[0]), int(text[-1]))


def test_what_the_validator_accepts_ends_in_any_timing() -> None:
    generator = random.Random(0)
    accepted = list(filter(is_valid, (shuffled(generator, generator.randint(2, 4), 3) for _ in range(600))))
    assert 50 < len(accepted) < 500
    for schedule in accepted:
        for knows_shapes in (True, False):
            RandomTiming(
                schedule, generator, buffered_sends=generator.randint(0, 4), knows_shapes=knows_shapes
            ).run()


class RandomTiming:
    """All ranks in random turns, apart from the validator's own run: like the transport, receives are posted
    (but for activations of unknown shape), computations wait for them, and a send waits while too many
    before it were not received."""

    def __init__(
        self, schedule: Schedule, generator: random.Random, *, buffered_sends: int, knows_shapes: bool
    ) -> None:
        self.knows_shapes = knows_shapes
        self.queues = [list(actions) for actions in schedule]
        self.generator = generator
        self.buffered_sends = buffered_sends
        self.sent: dict[tuple, list[Action]] = {}
        self.posted: dict[tuple, list[Action]] = {}

    def run(self) -> None:
        while any(self.queues):
            for head in [queue[0] for queue in self.queues if queue]:
                if head.op in RECEIVES and head not in self.posted.setdefault(self.channel(head), []):
                    self.posted[self.channel(head)].append(head)
            ready = [rank for rank, queue in enumerate(self.queues) if queue and self.can_start(queue[0])]
            assert ready, self.queues
            action = self.queues[self.generator.choice(ready)].pop(0)
            if action.op in SENDS:
                self.sent.setdefault(self.channel(action), []).append(action)
        for channel, sent in self.sent.items():
            assert self.posted[channel] == [counterpart(action) for action in sent]

    def channel(self, action: Action) -> tuple:
        """Named from the sender's end."""
        send = action if action.op in SENDS else counterpart(action)
        num_ranks = len(self.queues)
        return send.op, send.stage % num_ranks, counterpart(send).stage % num_ranks

    def can_start(self, action: Action) -> bool:
        if action.op is Op.RECV_BACKWARD or (action.op is Op.RECV_FORWARD and self.knows_shapes):
            return True
        if action.op is Op.RECV_FORWARD:
            return self.has_arrived(action)
        if action.op in COMPUTES:
            return all(self.has_arrived(receive) for receive in self.receives_of(action))
        channel = self.channel(action)
        return len(self.sent.get(channel, ())) < len(self.posted.get(channel, ())) + self.buffered_sends

    def receives_of(self, action: Action) -> list[Action]:
        receive = action._replace(op=Op.RECV_FORWARD if action.op is Op.FORWARD else Op.RECV_BACKWARD)
        return [posted for posts in self.posted.values() for posted in posts if posted == receive]

    def has_arrived(self, receive: Action) -> bool:
        channel = self.channel(receive)
        return len(self.sent.get(channel, ())) > self.posted[channel].index(receive)
