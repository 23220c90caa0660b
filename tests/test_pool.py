"""The worker pool: a test that fails, hangs or dies does not affect other tests."""

import os
import re
import signal
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from .pool import Pool, RankDied, RankHung, on_ranks


def sum_of(scale: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    total = scale * dist.get_rank() + offset
    dist.all_reduce(total)
    return total


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no good on rank {rank}")
    dist.all_reduce(torch.zeros(1))


def refuse() -> None:
    raise ValueError(f"refused on {dist.get_rank()}")


def die_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how != "exit":
            os.kill(os.getpid(), getattr(signal, how))
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def receive_what_nobody_sends() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)


def spoil_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["SPOILED"] = "1"


def settings() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        "SPOILED" in os.environ,
        torch.rand(1).item(),
    )


def fail_to_join(folder: str) -> None:
    """Let only rank 1 join another group."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        store = dist.FileStore(os.path.join(folder, "store"), 2)
        dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=1))


def warn() -> None:
    warnings.warn("workers obey the filters of the test", UserWarning, stacklevel=1)


def test_values_come_back_by_rank_and_tensors_are_pickled(pool: Pool) -> None:
    assert [value.tolist() for value in pool.run(3, sum_of, torch.ones(2), offset=1)] == [[6.0, 6.0]] * 3


def test_workers_are_reused_at_every_world_size(pool: Pool) -> None:
    first = pool.run(4, process_id)
    assert pool.run(2, process_id) == first[:2]
    assert pool.run(4, process_id) == first


def test_the_exception_of_the_rank_that_caused_the_failure_is_raised(pool: Pool) -> None:
    with pytest.raises(ValueError, match="no good on rank 2") as caught:
        pool.run(3, raise_on, 2)
    report = str(caught.value.__cause__)
    assert "rank 2 failed first" in report
    assert "rank 0 failed too" in report
    assert "raise ValueError" in report


def test_run_failing_gives_the_exception_of_every_rank(pool: Pool) -> None:
    assert [str(error) for error in pool.run_failing(2, refuse)] == ["refused on 0", "refused on 1"]
    assert pool.run_failing(2, process_id) == [None, None]


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGSEGV", r"killed by SIGSEGV[\s\S]*in die_on"),
        ("exit", "exit code 7"),
    ],
)
def test_a_worker_that_dies_is_named_and_replaced(pool: Pool, how: str, reported: str) -> None:
    before = pool.run(3, process_id)
    start = time.monotonic()
    with pytest.raises(RankDied, match=rf"rank 1.*{reported}"):
        pool.run(3, die_on, 1, how)
    assert time.monotonic() - start < 10
    after = pool.run(3, process_id)
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]


def test_a_test_that_hangs_says_where_each_rank_stood(pool: Pool) -> None:
    with pytest.raises(RankHung, match="rank 0 did not end within 2 s") as caught:
        pool.run(2, receive_what_nobody_sends, timeout=2)
    assert re.search(r"in recv\b[\s\S]*in receive_what_nobody_sends", str(caught.value))
    assert pool.run(2, sum_of, torch.ones(1))[0] == 1


def test_a_rank_that_could_not_join_a_group_joins_the_next_test(pool: Pool, tmp_path: os.PathLike) -> None:
    errors = pool.run_failing(2, fail_to_join, str(tmp_path))
    assert errors[0] is None
    assert errors[1] is not None
    assert pool.run(2, sum_of, torch.tensor(1), timeout=20) == [1, 1]


def test_a_worker_is_cleaned_between_tests(pool: Pool) -> None:
    before = pool.run(1, settings)
    pool.run(1, spoil_settings)
    assert pool.run(1, settings) == before
    assert before[0][:4] == (torch.float32, True, 1, False)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_warning_is_an_error_on_the_workers_too(pool: Pool) -> None:
    with pytest.raises(UserWarning, match="obey the filters"):
        pool.run(1, warn)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_warning_ignored_by_the_test_is_ignored_on_the_workers(pool: Pool) -> None:
    pool.run(1, warn)


@on_ranks(2)
def failing_body(rank: int) -> None:
    assert dist.get_world_size() == 2
    raise_on(rank)


def test_a_body_on_ranks_has_the_parameters_of_its_test_and_fails_it(pool: Pool) -> None:
    failing_body(pool, rank=2)
    with pytest.raises(ValueError, match="no good on rank 1"):
        failing_body(pool, rank=1)
