"""What the validator makes of whole schedules and of broken ones."""

import random

import pytest

from echelon.pipeline.action import COMPUTES, RECEIVES, SENDS, Action, Op, Schedule, counterpart
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import build_schedule, forward_only, one_f_one_b
from echelon.pipeline.validate import computation_errors, validate

from .small_schedules import cases, parsed, random_schedule, shuffled, written

STYLES = ["1f1b", "interleaved", "zbh1", "zbv"]


def full(name: str, num_ranks: int, num_microbatches: int, *, ahead: bool = True) -> Schedule:
    compute = build_schedule(name, num_ranks, num_microbatches, 2 if name == "interleaved" else 1)
    return with_communication(compute, ahead=ahead)


@pytest.mark.parametrize("ahead", [True, False])
def test_every_schedule_is_valid_in_training_and_evaluation(ahead: bool) -> None:
    for name, p, m, v in cases(6, 8):
        compute = build_schedule(name, p, m, v)
        for computations in (compute, forward_only(compute)):
            validate(with_communication(computations, ahead=ahead), m, receives_block=not ahead)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 3), (2, 3), (3, 2), (4, 5)])
def test_every_dropped_action_is_found_and_named(name: str, num_ranks: int, num_microbatches: int) -> None:
    whole = full(name, num_ranks, num_microbatches)
    for rank, actions in enumerate(whole):
        for index, action in enumerate(actions):
            broken = [list(others) for others in whole]
            del broken[rank][index]
            with pytest.raises(ValueError, match=f"rank {rank} lacks {action}"):
                validate(broken, num_microbatches)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 3), (3, 2)])
def test_every_repeated_action_is_found_and_named(name: str, num_ranks: int, num_microbatches: int) -> None:
    whole = full(name, num_ranks, num_microbatches)
    for rank, actions in enumerate(whole):
        for index, action in enumerate(actions):
            broken = [list(others) for others in whole]
            broken[rank].insert(index, action)
            with pytest.raises(ValueError, match=f"rank {rank} has {action} 2 times"):
                validate(broken, num_microbatches)


@pytest.mark.parametrize("name", STYLES)
def test_every_action_on_the_wrong_rank_is_found(name: str) -> None:
    whole = full(name, 3, 2)
    for index, action in enumerate(whole[2]):
        broken = [list(others) for others in whole]
        broken[0].append(broken[2].pop(index))
        fault = rf"rank 2 lacks {action}; .*rank 0 has {action}, which belongs to rank 2"
        with pytest.raises(ValueError, match=fault):
            validate(broken, 2)


def refused(num_microbatches: int, *ranks: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        validate(written(*ranks), num_microbatches)


def test_a_backward_that_is_missing_is_found() -> None:
    refused(2, "0F0 0B0 0F1", fault="rank 0 lacks 0B1")
    refused(2, "0F0 0I0 0W0 0F1", fault="rank 0 lacks 0I1; rank 0 lacks 0W1")
    refused(2, "0F0 0I0 0F1 0B1", fault="rank 0 lacks 0W0")
    refused(2, "0F0 0W0 0F1 0B1", fault="rank 0 lacks 0I0")


def test_a_whole_and_a_split_backward_may_stand_side_by_side() -> None:
    validate(written("0F0 0F1 0B1 0I0 0W0"), 2)


@pytest.mark.parametrize("parts", ["0I0 0W0", "0I0", "0W0"])
def test_a_backward_that_is_both_whole_and_split_is_found(parts: str) -> None:
    fault = f"there are 0B0 and {parts.replace(' ', ' and ')}: a backward is done whole or in its two parts"
    refused(1, f"0F0 0B0 {parts}", fault=fault)
    with pytest.raises(ValueError) as caught:
        validate(written(f"0F0 0sF0 0rB0 0B0 {parts}", "1rF0 1F0 1B0 1sB0"), 1)
    assert "lacks" not in str(caught.value) and "which" not in str(caught.value)


def test_weight_gradients_before_those_of_the_inputs_are_found() -> None:
    refused(1, "0F0 0W0 0I0", fault="rank 0 has 0W0 before 0I0")


def test_a_stage_nobody_holds_is_found() -> None:
    refused(1, "0F0 0B0", "2F0 2B0", fault="no rank holds stage 1")
    refused(1, "1F0 1B0", fault="no rank holds stage 0")
    refused(1, "0F0 1B0 0B0", fault="no rank holds stage 1; rank 0 lacks 1F0")
    refused(1, "0B0", fault="it has no forward")
    with pytest.raises(ValueError, match="there is no stage -1: the first is 0"):
        validate([[Action(Op.FORWARD, -1, 0), Action(Op.FORWARD, 0, 0)]], 1)


def test_a_stage_that_two_ranks_hold_is_found() -> None:
    refused(2, "0F0 0B0", "0F1 0B1", fault=r"stage 0 is held by rank 0 \(0F0\) and by rank 1 \(0F1\)")


def test_a_microbatch_that_is_not_there_is_found() -> None:
    with pytest.raises(ValueError, match="rank 0 has 0F1, which names none of the microbatches 0 to 0"):
        validate(full("1f1b", 2, 2), 1)
    with pytest.raises(ValueError, match="rank 1 lacks 1B2"):
        validate(full("1f1b", 2, 2), 3)


def test_transfers_that_nobody_needs_are_found() -> None:
    refused(
        1,
        "0F0 0sF0 1rF0 1F0 1B0 0B0",
        fault="rank 0 has 0sF0, which nothing answers or needs; rank 0 has 1rF0",
    )


def test_all_faults_are_told_at_once() -> None:
    broken = full("gpipe", 2, 2)
    broken[0].remove(parsed("0B1"))
    broken[1].remove(parsed("1rF0"))
    broken[1].insert(0, parsed("1B0"))
    with pytest.raises(ValueError, match=r"lacks 1rF0.*lacks 0B1.*has 1B0 2 times.*has 1B0 before 1F0"):
        validate(broken, 2)


def swapped(schedule: Schedule, rank: int, first: str, second: str) -> Schedule:
    actions = list(schedule[rank])
    i, j = actions.index(parsed(first)), actions.index(parsed(second))
    actions[i], actions[j] = actions[j], actions[i]
    return [actions if index == rank else others for index, others in enumerate(schedule)]


@pytest.mark.parametrize(
    "name, rank, first, second, fault",
    [
        ("1f1b", 0, "0F0", "0sF0", "has 0sF0 before 0F0"),
        ("1f1b", 1, "1rF0", "1F0", "has 1F0 before 1rF0"),
        ("1f1b", 0, "0rB1", "0B1", "has 0B1 before 0rB1"),
        ("1f1b", 0, "0rB0", "0sF0", "has 0rB0 before 0sF0"),
        ("1f1b", 1, "1B0", "1sB0", "has 1sB0 before 1B0"),
        ("1f1b", 1, "1F1", "1B1", "has 1B1 before 1F1"),
        ("zbh1", 1, "1I0", "1sB0", "has 1sB0 before 1I0"),
        ("zbh1", 0, "0rB1", "0I1", "has 0I1 before 0rB1"),
        ("zbv", 1, "1F0", "2F0", "has 2F0 before 1F0"),
        ("zbv", 1, "1I0", "2I0", "has 1I0 before 2I0"),
    ],
)
def test_an_action_before_what_it_needs_is_found(
    name: str, rank: int, first: str, second: str, fault: str
) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} {fault}"):
        validate(swapped(full(name, 2, 2), rank, first, second), 2)


def test_receives_swapped_on_a_channel_are_found() -> None:
    broken = swapped(full("gpipe", 2, 2), 1, "1rF0", "1rF1")
    with pytest.raises(ValueError, match="rank 1 has 1rF1 where rank 0 has 0sF0: both ends of a channel"):
        validate(broken, 2)


def test_sends_swapped_on_a_channel_are_found() -> None:
    broken = written("0F0 0F1 0sF1 0sF0 0rB0 0B0 0rB1 0B1", "1rF0 1rF1 1F0 1B0 1sB0 1F1 1B1 1sB1")
    with pytest.raises(ValueError, match="rank 1 has 1rF0 where rank 0 has 0sF1"):
        validate(broken, 2)


def test_activations_and_gradients_have_channels_of_their_own() -> None:
    """Rank 1 sends both to rank 0, activations first; rank 0 may post their receives in any order."""
    second = "1rF0 1F0 1sF0 1rB0 1B0 1sB0"
    validate(written("0F0 0sF0 2rF0 2F0 2B0 2sB0 0rB0 0B0", second), 1)
    validate(written("0F0 0sF0 0rB0 2rF0 2F0 2B0 2sB0 0B0", second), 1)


def test_a_circle_of_computations_is_a_deadlock() -> None:
    refused(
        2,
        "0F0 0sF0 0rB0 0B0 0F1 0sF1 0rB1 0B1",
        "1rF0 1F0 1rF1 1F1 1B0 1sB0 1B1 1sB1",
        fault="it deadlocks: rank 0 waits at 0B0 for 1sB0 of rank 1, rank 1 waits at 1F1 for 0sF1 of rank 0",
    )


def test_equal_orders_per_channel_that_wait_in_a_circle_are_a_deadlock() -> None:
    """Both ranks send first, and neither gets to its receive."""
    refused(
        2,
        "0F0 0sF0 0F1 0sF1 0rB0 0B0 0rB1 0B1",
        "1rF0 1F0 1B0 1sB0 1rF1 1F1 1B1 1sB1",
        fault="rank 0 waits at 0sF1 for 1rF1 of rank 1, rank 1 waits at 1sB0 for 0rB0",
    )


POSTED_AHEAD = written("0F0 0sF0 0rB0 0B0 0F1 0sF1 0rB1 0B1", "1rF0 1F0 1rF1 1B0 1sB0 1F1 1B1 1sB1")


def test_receives_may_be_posted_ahead() -> None:
    validate(POSTED_AHEAD, 2)


def test_a_receive_before_what_makes_its_sender_go_on_deadlocks_where_receives_block() -> None:
    with pytest.raises(
        ValueError, match="rank 0 waits at 0rB0 for 1sB0 of rank 1, rank 1 waits at 1rF1 for 0sF1"
    ):
        validate(POSTED_AHEAD, 2, receives_block=True)


def test_faults_of_computations_are_found_without_their_transfers() -> None:
    for name, p, m, v in cases(4, 4):
        assert computation_errors(build_schedule(name, p, m, v), m) == []
    broken = one_f_one_b(2, 3)
    broken[0].remove(parsed("0B2"))
    broken[1].remove(parsed("1B0"))
    broken[1].insert(0, parsed("1B0"))
    assert computation_errors(broken, 3) == ["rank 0 lacks 0B2", "rank 1 has 1B0 before 1F0"]


@pytest.mark.parametrize("receives_block", [True, False])
def test_what_the_validator_accepts_ends_in_any_timing(receives_block: bool) -> None:
    generator = random.Random(0)
    tried = [shuffled(generator) for _ in range(1500)]
    accepted = [schedule for schedule, m in tried if is_valid(schedule, m, receives_block=receives_block)]
    assert 50 < len(accepted) < 1000
    for schedule in accepted:
        RandomTiming(schedule, generator, receives_block=receives_block).run()


def is_valid(schedule: Schedule, num_microbatches: int, *, receives_block: bool) -> bool:
    try:
        validate(schedule, num_microbatches, receives_block=receives_block)
    except ValueError:
        return False
    return True


def test_orders_of_any_kind_end_in_any_timing() -> None:
    generator = random.Random(1)
    for _ in range(200):
        compute, _ = random_schedule(generator)
        RandomTiming(with_communication(compute), generator, receives_block=False).run()
        RandomTiming(with_communication(compute, ahead=False), generator, receives_block=True).run()


class RandomTiming:
    """All ranks in random turns over channels that hold any number of sends, apart from the validator's own
    run: computations wait for what was received, sends wait while too many before them were not."""

    def __init__(self, schedule: Schedule, generator: random.Random, *, receives_block: bool) -> None:
        self.queues = [list(actions) for actions in schedule]
        self.holders = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
        self.generator = generator
        self.receives_block = receives_block
        self.buffered_sends = generator.randint(0, 4)
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
        return send.op, self.holders[send.stage], self.holders[counterpart(send).stage]

    def can_start(self, action: Action) -> bool:
        if action.op in RECEIVES:
            return not self.receives_block or self.has_arrived(action)
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
