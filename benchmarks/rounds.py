"""Timing of several contenders: all run in every round."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from contender import Contender

C = TypeVar("C", bound=Contender)


class Clock:
    """The common time of all ranks, from a barrier. The constructor is collective over the world."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Gloo waits without spinning, so that a waiting rank leaves its core to others.
        self._group = dist.new_group(backend="gloo")

    def time(self, work: Callable[[], None]) -> float:
        """Return the seconds from a barrier over the world until this rank has done the work."""
        self._synchronize()
        dist.barrier(self._group)
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def slowest(self, seconds: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the largest of all ranks, by entry. All-reduce over the world."""
        table = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._group)
        return table.tolist()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def step(contender: Contender) -> None:
    """Run a training step: forward, backward, the optimizer's step, and drop the gradients."""
    contender.compute()
    contender.update()


def time_rounds(
    contenders: Sequence[C],
    *,
    rounds: int,
    warmup: int,
    device: torch.device,
    before: Callable[[C], None] = lambda contender: None,
    work: Callable[[C], None] = step,
) -> dict[str, list[float]]:
    """Run one step of every contender in each round, in an order that rotates from round to round.

    A step lasts from a barrier until the slowest rank has done the work: by default a training step.
    Python's garbage is collected between the steps and not within them. Communicates.

    Args:
        rounds: the number of timed rounds.
        warmup: the number of rounds before.
        before: runs before the barrier, outside of the measured time.
        work: the timed work.

    Returns:
        Seconds of each round's step, by contender.
    """
    clock = Clock(device)
    local_seconds = [[0.0] * rounds for _ in contenders]
    for number, index in in_turn(len(contenders), rounds=rounds, warmup=warmup):
        before(contenders[index])
        seconds = clock.time(partial(work, contenders[index]))
        if number >= 0:
            local_seconds[index][number] = seconds
    return {
        contender.name: seconds
        for contender, seconds in zip(contenders, clock.slowest(local_seconds), strict=True)
    }


def in_turn(count: int, *, rounds: int, warmup: int) -> Iterator[tuple[int, int]]:
    """Yield the number of a round, below 0 for warm-up, and the next index; the order rotates from round to round.

    Python's garbage is collected after each and not within.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(-warmup, rounds):
        for turn in range(count):
            yield number, (turn + number) % count
            gc.collect()
    gc.enable()
    gc.unfreeze()
