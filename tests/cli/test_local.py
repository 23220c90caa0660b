"""Local processes: what they answer, and how it is told that one failed."""

import pytest
import torch
import torch.distributed as dist

from echelon.cli.local import run_on_processes

LARGE = 2**18  # an answer of 2 MB, more than a pipe holds


def sum_of_ranks(rank: int, factor: int) -> tuple[int, list[int]]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return factor * int(total), [rank] * LARGE


def fail_on_rank_1(rank: int) -> int:
    if rank == 1:
        raise ValueError("no such luck")
    return rank


@pytest.mark.slow
def test_every_rank_answers_however_much_it_says() -> None:
    answers = run_on_processes(sum_of_ranks, (10,), num_processes=2, timeout_seconds=60)
    assert answers == [(10, [0] * LARGE), (10, [1] * LARGE)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    told = run_on_processes(fail_on_rank_1, (), num_processes=2, timeout_seconds=60)
    assert isinstance(told, str)
    assert told.startswith("rank 1 failed:\nTraceback") and "ValueError: no such luck" in told
