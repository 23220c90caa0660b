"""Ranks that are threads of one process: the group of an axis exchanges tensors in memory, without torch.distributed.

A trial thus executes the layers that boost makes, with their collectives, in forward and backward, before any process
group is used. torch's collectives call methods of the group that they are given, so a `ThreadGroup` stands in for one.

The threads take turns: one computes until its next collective. So each has a random state of its own on the CPU, like a
process, and ranks of equal seeds draw equal numbers.
"""

from collections.abc import Callable, Sequence
from threading import Barrier, BrokenBarrierError, Lock, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_TIMEOUT = 300.0  # seconds, on a busy host: it passes only if ranks call different collectives


class _Meeting:
    """The exchange of the threads of a group."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.turn = size, Barrier(size, timeout=_TIMEOUT), Lock()
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order. A rank calls it with None at the end of its work.

        Raises:
            BrokenBarrierError: another rank raised, or has ended while this one has not.
        """
        self._values[rank] = value
        self._wait()
        values = [*self._values]
        self._wait()  # until all have read, before the next exchange writes
        if value is not None and any(other is None for other in values):
            raise BrokenBarrierError
        return values

    def _wait(self) -> None:
        """Let the other threads compute until all wait; then continue with the random state of before."""
        state = torch.get_rng_state()
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()
            torch.set_rng_state(state)


class ThreadGroup:
    """The group of one thread, with the methods of a process group that the layers call. Made by `thread_groups`."""

    group_name = "threads"

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank, self.meeting = rank, meeting

    def rank(self) -> int:
        """This thread's place in the group."""
        return self._rank

    def size(self) -> int:
        """The number of threads."""
        return self.meeting.size

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> "_Done":
        """Reduce a tensor in place, in the order of ranks."""
        (tensor,) = tensors
        rows = torch.stack(self._exchange(tensor))
        tensor.copy_(rows.amax(0) if options.reduceOp.op.name == "MAX" else rows.sum(0))
        return _DONE

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], _: Any) -> "_Done":
        """Gather a tensor of every rank."""
        for output, received in zip(outputs[0], self._exchange(inputs[0]), strict=True):
            output.copy_(received)
        return _DONE

    def all_gather_single(self, output: Tensor, input_: Tensor, _: Any) -> "_Done":
        """Gather the ranks' slices into one tensor."""
        output.copy_(torch.cat(self._exchange(input_)).view_as(output))
        return _DONE

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, _: Any) -> "_Done":
        """Sum the ranks' tensors, and keep this rank's slice."""
        slices = [tensor.chunk(self.size())[self._rank] for tensor in self._exchange(input_)]
        output.copy_(torch.stack(slices).sum(0).view_as(output))
        return _DONE

    def all_to_all_single(
        self, output: Tensor, input_: Tensor, received: Sequence[int], sent: Sequence[int], _: Any
    ) -> "_Done":
        """Exchange rows, `sent[i]` of them to rank i; slices of equal length if `sent` is empty.

        `received` is not used: it follows from the other ranks' pieces.
        """
        rows = input_.detach().clone()
        pieces = rows.split([*sent]) if sent else rows.tensor_split(self.size())
        pieces_by_rank = self.meeting.exchange(self._rank, pieces)
        output.copy_(torch.cat([pieces_of_rank[self._rank] for pieces_of_rank in pieces_by_rank]))
        return _DONE

    def shift(self, output: Tensor, input_: Tensor) -> None:
        """Receive the tensor of the previous rank, which the next one receives from this rank."""
        output.copy_(self._exchange(input_)[self._rank - 1])

    # Their names before torch 2.13
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self._rank, tensor.detach().clone())

    def _get_backend(self, device: torch.device) -> "ThreadGroup":
        return self

    def name(self) -> str:
        """The name of the backend."""
        return self.group_name


class _Done:
    """Communication that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


_DONE = _Done()


def thread_groups(size: int) -> list[ThreadGroup]:
    """Return the group of every rank, for `run_threads`."""
    meeting = _Meeting(size)
    return [ThreadGroup(rank, meeting) for rank in range(size)]


def _of_collective(error: Exception) -> Exception:
    """Return the error of a collective in place of that of torch's log, which looks up its group among real ones."""
    context = error.__context__
    return context if isinstance(context, Exception) and "world group map" in str(error) else error


def run_threads(groups: Sequence[ThreadGroup], work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Run `work` in a thread for every rank of a group; return the results by rank.

    Raises:
        Exception: the first that a rank raised; the others stop at their next collective.
        RuntimeError: the ranks called different collectives.
    """
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run(group: ThreadGroup) -> None:
        with group.meeting.turn:
            try:
                results[group.rank()] = work(group)
                group.meeting.exchange(group.rank(), None)
            except Exception as raised:  # of any model's code; `run_threads` raises it
                error = _of_collective(raised)
                if not isinstance(error, BrokenBarrierError):  # another rank raised, or has ended
                    errors.append(error)
                    group.meeting.barrier.abort()

    threads = [Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError("the ranks waited too long for each other: a collective takes at most 300 s here")
    if len(results) < len(groups):
        raise RuntimeError(
            f"rank(s) {sorted(results)} of {len(groups)} made fewer collective calls than the others"
        )
    return [results[rank] for rank in range(len(groups))]
