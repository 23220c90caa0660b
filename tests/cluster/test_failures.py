"""A rank that fails, dies or leaves is named on every rank that waits for it, directly or not."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import watch
from echelon.cluster.errors import RankFailure
from echelon.cluster.failures import naming_failures, start_watch, stop_watch
from echelon.cluster.heartbeats import Event, Heartbeat, HeartbeatStore, WatchedCall

from ..pool import Pool, RankDied
from .processes import run_together


def fail(how: str) -> None:
    time.sleep(0.3)  # the others wait by now
    if how == "raise":
        raise ValueError("the data is bad")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def all_reduce_but(rank: int, how: str) -> None:
    with naming_failures("optimizer.step"):
        dist.all_reduce(torch.zeros(1))
        if dist.get_rank() == rank:
            fail(how)
        dist.all_reduce(torch.zeros(1))


def wait_in_a_chain(how: str) -> None:
    """Each rank receives from the next one, and the last one fails."""
    rank = dist.get_rank()
    with naming_failures("execute_pipeline"):
        if rank == dist.get_world_size() - 1:
            fail(how)
        dist.recv(torch.zeros(1), src=rank + 1)


def leave_between_calls() -> None:
    """Nested calls count as the outermost, and data that ends is no failure."""
    with pytest.raises(StopIteration), naming_failures("execute_pipeline"):
        next(iter([]))
    with naming_failures("execute_pipeline"):
        dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == 1:
        raise KeyError("outside")
    with naming_failures("outer"), naming_failures("inner"):
        dist.all_reduce(torch.zeros(1))


def receive_what_nobody_sends() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 0:
        with naming_failures("execute_pipeline"):
            dist.recv(torch.zeros(1), src=1, group=group)
    else:
        with naming_failures("optimizer.step"):
            time.sleep(6)


def recover_from_an_error() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"), naming_failures("boost"):
            raise ValueError("refused")
        time.sleep(1.2)  # the news is out
        with naming_failures("execute_pipeline"):
            dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == 2:
        with naming_failures("optimizer.step"):
            raise ValueError("the real one")
    with naming_failures("optimizer.step"):
        dist.all_reduce(torch.zeros(1))


def wait_for_one_that_failed_and_lives() -> None:
    watch.STUCK_SECONDS = 1.0
    if dist.get_rank() == 1:
        with pytest.raises(ValueError), naming_failures("execute_pipeline"):
            raise ValueError("kept")
        time.sleep(5)  # its connections stay open
        return
    with naming_failures("execute_pipeline"):
        dist.all_reduce(torch.zeros(1))


def outlive_one_that_died() -> None:
    watch.STUCK_SECONDS, said = 1.0, list[str]()
    start_watch()
    if dist.get_rank() == 1:
        fail("exit")
    with patch.object(watch, "_say", said.append):
        time.sleep(4)  # as in loss.item() of a GPU that waits
    (told,) = said
    assert told.startswith("rank 1 died: its process is gone; rank 0 is outside of Echelon, after call "), (
        told
    )


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "echelon watch"]


def count_threads() -> list[int]:
    time.sleep(1.5)  # that of the test before ends too
    counts = [len(threads())]
    for _ in range(2):
        start_watch()
        counts.append(len(threads()))
    stop_watch()
    counts.append(len(threads()))
    with naming_failures("boost"):
        counts.append(len(threads()))
    dist.destroy_process_group()
    time.sleep(1.5)
    return [*counts, len(threads())]


def test_one_thread_posts_while_another_reads() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heartbeats = HeartbeatStore(store, 0)
    texts = [str(number) for number in range(300)]

    def post() -> None:
        for text in texts:
            heartbeats.post(Event(rank=0, kind="failed", text=text))

    poster, read = threading.Thread(target=post), []
    poster.start()
    while poster.is_alive():
        read += heartbeats.news()
    assert [event.text for event in read + heartbeats.news()] == texts


DATA = "ValueError: the data is bad"


@pytest.mark.parametrize(
    "row",  # number of ranks, their work and its arguments, the rank at fault, the others' error, and its own
    [
        (4, all_reduce_but, (0, "raise"), 0, f"rank 0 failed: {DATA}; ", ValueError),
        (4, all_reduce_but, (2, "raise"), 2, f"rank 2 failed: {DATA}; ", ValueError),
        (4, all_reduce_but, (1, "kill"), 1, "rank 1 died: its process is gone; ", RankDied),
        (4, all_reduce_but, (1, "exit"), 1, "rank 1 died: its process is gone; ", RankDied),
        # A rank that waits for one that waits names the first cause.
        (4, wait_in_a_chain, ("kill",), 3, "rank 3 died", RankDied),
        (4, wait_in_a_chain, ("raise",), 3, f"rank 3 failed: {DATA}", ValueError),
        (3, leave_between_calls, (), 1, "rank 1 left: ", KeyError),
        # An error that was handled is not blamed later.
        (3, recover_from_an_error, (), 2, "rank 2 failed: ValueError: the real one; ", ValueError),
    ],
)
def test_a_rank_that_fails_dies_or_leaves_is_named_by_all_and_keeps_its_own_error(
    pool: Pool, row: tuple[Any, ...]
) -> None:
    """Every other rank ends with an error that names it, and before the timeout."""
    num_ranks, act, arguments, rank, message, raised = row
    errors = pool.run_failing(num_ranks, act, *arguments)
    assert isinstance(errors[rank], raised)
    if arguments[-1:] == ("raise",):
        assert str(errors[rank]) == "the data is bad"
    for other, error in enumerate(errors):
        if other != rank:
            assert isinstance(error, RankFailure), (other, error)
            assert error.rank == rank
            assert str(error).startswith(message), error
            assert f"this rank ({other}) was waiting for it in " in str(error)
            assert "RuntimeError: " in str(error.__cause__)
            assert "imed out" not in str(error.__cause__)
            if act is leave_between_calls:
                assert " was waiting for it in outer, all_reduce" in str(error)


def test_a_timeout_says_where_the_others_are(pool: Pool) -> None:
    error = pool.run_failing(2, receive_what_nobody_sends)[0]
    assert isinstance(error, RankFailure)
    assert "rank 0 timed out in execute_pipeline (call 1) and no rank has failed" in str(error)
    assert "likely cause: rank 1 is in another call, optimizer.step" in str(error)


@pytest.mark.slow
def test_a_process_that_cannot_be_freed_ends_itself(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    error = Pool.run_failing(pool, 2, wait_for_one_that_failed_and_lives)[0]
    assert isinstance(error, RankDied)
    assert "exit code 1" in str(error)


def test_another_rank_that_ends_does_not_prolong_the_wait_in_a_call_without_end() -> None:
    here, now = object.__new__(watch.Watch), time.monotonic()
    here.rank, here.here = 1, Heartbeat(beat=0, action="execute_pipeline", calls=7)
    here._heartbeats, here._events = MagicMock(), [Event(rank=0, kind="gone")]
    here._store_is_lost, here._num_errors, here._reported = False, 0, None
    since = now - watch.STUCK_SECONDS - 2 * watch.BRIEF_SECONDS
    unmatched = RankFailure("rank 2 has another batch", 2)
    here._call = WatchedCall(thread_id=0, entered=since, is_reported=True, unmatched=unmatched, since=since)
    with patch.object(os, "_exit", side_effect=SystemExit), pytest.raises(SystemExit):
        here._end_if_stuck()  # rank 0 ended just now, and freed nobody here
    here._call.since = now  # found just now: others may be freed by the end of rank 0
    with patch.object(os, "_exit", side_effect=AssertionError):
        here._end_if_stuck()


@pytest.mark.slow
def test_a_rank_outside_of_calls_is_told_of_one_that_died_and_goes_on(pool: Pool) -> None:
    errors = Pool.run_failing(pool, 2, outlive_one_that_died)
    assert errors[0] is None, errors[0]
    assert isinstance(errors[1], RankDied)


def test_the_thread_lives_as_long_as_the_group(pool: Pool) -> None:
    assert pool.run(2, count_threads) == [[0, 1, 1, 0, 1, 0]] * 2


SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from echelon.cluster.failures import naming_failures
from echelon.cluster.launch import launch_from_torch

how, bad = sys.argv[1], int(sys.argv[2])
launch_from_torch(backend="gloo")
dist.all_reduce(torch.zeros(1))
if dist.get_rank() == bad:
    time.sleep(0.5)
    if how == "kill":
        os.kill(os.getpid(), 9)
    raise LookupError("no such file")
with naming_failures("execute_pipeline"):
    dist.recv(torch.zeros(1), src=bad)
"""


def run_script(folder: Path, how: str, rank: int) -> str:
    """Return the standard error of three processes that torchrun starts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    command = [*launcher, "script.py", how, str(rank)]
    (done,) = run_together([command], [os.environ], cwd=folder, seconds=100)
    assert done.status == 1
    return done.err


def run_script_by_hand(folder: Path, how: str, rank: int) -> str:
    """The same without a launcher. Rank 0 holds the store, which goes with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environments = [{**common, "RANK": number, "LOCAL_RANK": number} for number in "012"]
    commands = [[sys.executable, "script.py", how, str(rank)]] * 3
    return "".join(process.err for process in run_together(commands, environments, cwd=folder, seconds=100))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "how", "rank", "told"),
    [
        (run_script, "raise", 2, "rank 2 failed: LookupError: no such file; "),
        (run_script, "kill", 2, "rank 2 died: its process is gone; "),
        (run_script_by_hand, "kill", 0, "the store is gone, which rank 0 or its launcher hosts; "),
    ],
)
def test_the_ranks_of_a_script_say_who_failed(
    tmp_path: Path, run: Callable[[Path, str, int], str], how: str, rank: int, told: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    errors = run(tmp_path, how, rank)
    for other in {0, 1, 2} - {rank}:
        assert f"{told}this rank ({other}) was waiting for it in execute_pipeline" in errors


TERMINATED = """
import os, signal
from echelon.cluster.failures import termination_deferred
try:
    with termination_deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise StopIteration
except StopIteration:
    print("goes on", flush=True)
with termination_deferred():
    print("never reached", flush=True)
"""


def test_a_termination_in_a_call_whose_error_is_handled_ends_the_next_call() -> None:
    result = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, "goes on\n"), result.stderr


def test_the_cause_is_the_oldest_failure_that_stands() -> None:
    events = [
        Event(rank=rank, kind=kind, text="", consequence=False, errors=0)
        for rank, kind in ((1, "failed"), (1, "recovered"), (0, "failed"), (1, "failed"))
    ]
    standing = watch.Watch._standing(MagicMock(_events=events))
    assert [event.rank for event in standing] == [0, 1]
