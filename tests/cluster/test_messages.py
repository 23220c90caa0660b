"""Messages between processes of one machine: order, room, and what becomes of them when a process ends."""

import atexit
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch.distributed as dist

from echelon.cluster import messages, process_memory
from echelon.cluster.messages import Messages, knock, open_door
from echelon.cluster.process_memory import find_neighbours
from echelon.cluster.rank_failure import BROKEN, TIMED_OUT

from ..pool import Pool

MANY = 3000  # the kernel has room for a tenth of that


def connected() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def pair(patience: float = 30.0) -> tuple[Messages, Messages]:
    """Two ends in this process: rank 0's with a line to rank 1, and the other way round."""
    first, second = connected()
    return Messages({1: first}, {1: os.getpid()}, patience), Messages({0: second}, {0: os.getpid()}, patience)


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "echelon messages"]


@contextmanager
def child(does: Callable[[Messages], None]) -> Iterator[tuple[Messages, int]]:
    """The line to a fork, rank 1, that does something with its own, to rank 0, and ends as processes do; its number."""
    ours, its = connected()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            atexit._clear()
            does(Messages({0: its}, {0: os.getppid()}, 30.0))
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    its.close()
    try:
        yield Messages({1: ours}, {1: pid}, 30.0), pid
    finally:
        if pid not in ENDED:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


ENDED: set[int] = set()


def ends_well(pid: int, seconds: float) -> bool:
    """Whether a child ends by itself in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ENDED.add(pid)
            return status == 0
        time.sleep(0.01)
    return False


def test_each_tag_has_an_order_of_its_own() -> None:
    here, there = pair()
    for number in range(5):
        here.tell(1, 7, number)
        here.tell(1, 8, -number, 2**62)
    assert [list(there.hear(0, 8)) for _ in range(5)] == [[-number, 2**62] for number in range(5)]
    assert there.count_heard(0, 7) == 5
    there.tell(0, 7)
    assert [there.hear(0, 7)[0] for _ in range(5)] == list(range(5))
    assert there.count_heard(0, 7) == 0
    assert list(here.hear(1, 7)) == []


def test_nothing_is_kept_of_tags_that_were_heard() -> None:
    """Every step has tags of its own."""
    teller, hearer = pair()
    for step in range(100):
        teller.tell(1, step, step)
        teller.tell(1, step + 1000, step)
        assert hearer.hear(0, step + 1000)[0] == hearer.hear(0, step)[0] == step
        assert hearer.count_heard(0, step) == 0
    assert not hearer._heard


def test_more_than_there_is_room_for_arrives_in_order_both_ways() -> None:
    """Neither waits: both have told all before one hears anything."""
    here, there = pair()
    for number in range(MANY):
        here.tell(1, number % 2, number)
        there.tell(0, 0, -number)
    assert senders()
    for number in range(MANY):
        assert here.hear(1, 0)[0] == -number
        assert there.hear(0, number % 2)[0] == number
    for thread in senders():
        thread.join(timeout=10)
    assert not senders()
    here.tell(1, 0, 5)
    assert there.hear(0, 0)[0] == 5


def test_who_has_told_more_than_there_is_room_for_may_wait_elsewhere(pool: Pool) -> None:
    pool.run(2, tell_and_wait_elsewhere, timeout=30)


def tell_and_wait_elsewhere() -> None:
    """The second rank hears all before it comes where the first one waits for it."""
    neighbours = find_neighbours(dist.group.WORLD)
    assert neighbours is not None
    for number in range(MANY):
        if dist.get_rank() == 0:
            neighbours.messages.tell(1, 0, number)
        else:
            assert neighbours.messages.hear(0, 0)[0] == number
    dist.barrier()


def test_a_line_that_is_full_holds_up_no_other() -> None:
    ends = {rank: connected() for rank in (1, 2)}
    here = Messages({rank: end for rank, (end, _) in ends.items()}, dict.fromkeys(ends, os.getpid()))
    first, second = (Messages({0: end}, {0: os.getpid()}, 5.0) for _, end in ends.values())
    for number in range(MANY):
        here.tell(1, 0, number)
    here.tell(2, 0, 5)
    assert second.hear(0, 0)[0] == 5
    assert [first.hear(0, 0)[0] for _ in range(MANY)] == list(range(MANY))


def test_what_was_told_arrives_when_its_teller_is_dropped() -> None:
    here, there = pair()
    for number in range(MANY):
        here.tell(1, 0, number)
    there.tell(0, 0, 1)  # what is never heard
    del here
    gc.collect()
    assert [there.hear(0, 0)[0] for _ in range(MANY)] == list(range(MANY))
    with pytest.raises(RuntimeError, match="Connection closed by peer") as raised:
        there.hear(0, 0)
    assert BROKEN.search(str(raised.value))
    there.tell(0, 0, 1)  # nobody is there, and nobody minds


def test_patience_ends_with_words_that_are_taken_for_a_timeout() -> None:
    here, there = pair(patience=0.1)
    there.tell(0, 3)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of the group") as raised:
        here.hear(1, 4)
    assert TIMED_OUT.search(str(raised.value)) and not BROKEN.search(str(raised.value))
    assert time.monotonic() - start < 4
    here.hear(1, 3)


def test_signals_neither_lose_nor_break_what_is_heard() -> None:
    here, there = pair()
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        timer = threading.Timer(0.5, lambda: there.tell(0, 0, 9))
        timer.start()
        assert here.hear(1, 0)[0] == 9
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(came) > 5


def tell_and_stay(told: Messages) -> None:
    told.tell(0, 1, 11)
    time.sleep(60)


def tell_and_stay_with_a_child(told: Messages) -> None:
    if os.fork() == 0:
        told.hear(0, 99)  # until the other end is closed
    tell_and_stay(told)


@pytest.mark.parametrize("does", [tell_and_stay, tell_and_stay_with_a_child])
def test_a_process_that_is_killed_is_noticed_also_where_a_child_holds_its_lines(
    does: Callable[[Messages], None],
) -> None:
    with child(does) as (here, pid):
        here.hear(1, 1)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=f"process {pid}, rank 1 of the group") as raised:
            here.hear(1, 1)
        assert BROKEN.search(str(raised.value))
        assert time.monotonic() - start < 5
        here.close()


def tell_three(told: Messages) -> None:
    for number in range(3):
        told.tell(0, 1, number)


def test_what_a_process_told_before_it_ended_is_heard() -> None:
    with child(tell_three) as (here, pid):
        here.tell(1, 0, 5)  # which it never hears
        assert ends_well(pid, 10)
        assert [here.hear(1, 1)[0] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            here.hear(1, 1)


def flood(told: Messages) -> None:
    for number in range(MANY):
        told.tell(0, 1, number)


def test_a_process_that_ends_waits_for_room() -> None:
    with child(flood) as (here, pid):
        here.hear(1, 1)
        assert not ends_well(pid, 0.3)
        assert [here.hear(1, 1)[0] for _ in range(MANY - 1)] == list(range(1, MANY))
        assert ends_well(pid, 10)


def flood_and_fail(told: Messages) -> None:
    flood(told)
    sys.last_type = LookupError  # the interpreter sets it once it has printed an exception


def test_a_process_that_an_error_ends_waits_for_no_room() -> None:
    with child(flood_and_fail) as (_, pid):
        assert ends_well(pid, 10)


def flood_once_asked(told: Messages) -> None:
    told.hear(0, 5)
    flood(told)


def test_two_processes_that_end_do_not_wait_for_each_other() -> None:
    """This one ends too, as far as the other one can see."""
    with child(flood_once_asked) as (here, pid):
        for _ in range(MANY):
            here.tell(1, 5)
        with patch.object(messages, "_LINES", list(here._lines.values())):
            messages._end_sending()
        assert ends_well(pid, 10)


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    number = os.getpid() * 2**20 + 1
    door = open_door(number, 1)
    assert door is not None
    stranger = knock(number)
    assert stranger is not None

    def come(told: Messages) -> None:
        line = knock(number)
        assert line is not None
        Messages({0: line}, {0: 1}).tell(0, 1, 5)

    with child(come) as (_, pid):
        assert ends_well(pid, 10)
        lines = door.let_in({pid: 1})
    assert Messages(lines, {1: pid}).hear(1, 1)[0] == 5
    with stranger:
        assert stranger.recv(10) == b"", "it was shown out"
    door.close()
    assert knock(number) is None


def test_nobody_waits_before_a_door_at_which_too_many_stand() -> None:
    number = os.getpid() * 2**20 + 2
    door = open_door(number, 1)
    assert door is not None
    came = [knock(number) for _ in range(messages._STRANGERS + 5)]
    assert came[-1] is None
    for line in came:
        if line is not None:
            line.close()
    door.close()


def test_a_door_that_cannot_be_opened_is_none() -> None:
    number = os.getpid() * 2**20 + 3
    door = open_door(number, 1)
    assert door is not None
    assert open_door(number, 1) is None
    door.close()


@pytest.mark.parametrize("what", ["knock", "open_door", "_read"])
def test_one_rank_that_cannot_reach_the_others_makes_all_agree(pool: Pool, what: str) -> None:
    assert pool.run(3, find_with_one_that_cannot, what, timeout=30) == [True] * 3


def find_with_one_that_cannot(what: str) -> bool:
    """As where too many files are open, or the kernel lets no process read another one."""
    files = os.listdir("/proc/self/fd")
    answer = -1 if what == "_read" else None
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(process_memory, what, lambda *arguments: answer)
        found = find_neighbours(dist.group.WORLD)
    assert len(os.listdir("/proc/self/fd")) == len(files)
    return found is None


def test_files_are_closed_with_what_uses_them(pool: Pool) -> None:
    pool.run(3, check_files)


def check_files() -> None:
    find_neighbours(dist.group.WORLD)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        found = find_neighbours(dist.group.WORLD)
        assert found is not None
        assert len(os.listdir("/proc/self/fd")) == before + 2
        for rank in found.pids:
            if rank != dist.get_rank():
                found.messages.tell(rank, 0)
        del found
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_that_drops_its_copy_leaves_the_line_open() -> None:
    here, there = pair()
    for number in range(MANY):
        here.tell(1, 0, number)
    forked = os.fork()
    if forked == 0:
        messages._end_sending()
        here.close()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    there.tell(0, 0, 7)
    assert here.hear(1, 0)[0] == 7
    assert [there.hear(0, 0)[0] for _ in range(MANY)] == list(range(MANY))


def test_a_peer_that_hears_no_more_is_not_waited_for_at_the_end() -> None:
    here, there = pair()
    for number in range(MANY):
        here.tell(1, 0, number)
    with patch.object(messages, "_LINES", list(here._lines.values())):
        there._lines[0].listen_no_more()
        start = time.monotonic()
        messages._end_sending()
    assert time.monotonic() - start < 5
