"""SIGTERM and Ctrl-C, asked for between two steps."""

import os
import signal

import torch.distributed as dist

from echelon import Interruption

from ..pool import Pool


def asked(number: int) -> list[int]:
    """Return the answers before and after the last rank got a signal twice."""
    handlers = [signal.getsignal(number) for number in Interruption.SIGNALS]
    with Interruption() as interruption:
        answers = [interruption.requested()]
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        answers.append(interruption.requested())
    assert handlers == [signal.getsignal(number) for number in Interruption.SIGNALS]
    return answers


def test_all_ranks_learn_of_a_signal_of_one(pool: Pool) -> None:
    assert pool.run(2, asked, signal.SIGTERM) == [[0, signal.SIGTERM]] * 2
    assert pool.run(1, asked, signal.SIGINT) == [[0, signal.SIGINT]]
