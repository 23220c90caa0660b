"""Reduce-scatter and all-gather over gloo by point-to-point slices. collectives.py decides when to use them.

[Note: slices] gloo's own reduce-scatter and all-gather first copy full buffers: for 128 MiB on two ranks (2 cores)
they took 236 and 188 ms, point-to-point slices take 52 and 45. In a reduce-scatter each rank sends every other rank
that rank's slice, and the receiver adds up. As with NCCL, communication that started completes although no rank waits.
"""

from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from .traffic import one_collective

# Shorter buffers gain nothing. Tests patch this: 0 sends slices of all buffers, infinity of none.
MIN_BYTES: float = 2**16
# Elements added at a time, while the next are in flight: they fit a core's cache.
_PART = 2**18
_GATHER, _REDUCE = 2**20, 2**20 + 1  # message tags, different from those of ring.py


def takes(whole: Tensor, group: dist.ProcessGroup) -> bool:
    """Return True for a long buffer on a CPU over gloo, which is communicated in slices. Equal on all ranks."""
    if whole.device.type != "cpu" or whole.nbytes < MIN_BYTES or group.size() == 1:
        return False
    return bool(group._get_backend(whole.device).name() == "gloo")


class AllGather:
    """An all-gather in flight: each rank sends its slice to all others. The constructor starts it.

    Args:
        whole: the buffer; `own_slice` may be this rank's slice of it.
        own_slice: contiguous, of the same length on all ranks.
        group: every rank of it must construct one.
    """

    def __init__(self, whole: Tensor, own_slice: Tensor, group: dist.ProcessGroup) -> None:
        slices, others = whole.chunk(group.size()), _others(group)
        with one_collective("all_gather", whole.nbytes, group):
            self._works = [group.recv([slices[rank]], rank, _GATHER) for rank in reversed(others)]
            self._works += [group.send([own_slice], rank, _GATHER) for rank in others]
        _copy(own_slice, slices[group.rank()])
        _end_when_dropped(self, self._works)

    def wait(self) -> None:
        """Wait until the buffer is filled and may be written to. A second call does nothing."""
        _wait_for(self._works)


class ReduceScatter:
    """A reduce-scatter in flight: each rank receives and adds up its slice of all buffers. The constructor starts it.

    16-bit formats are added up in float32.

    Args:
        own_slice: receives this rank's slice of the sum. It may be that slice of `whole`; the rest is kept.
        whole: the buffer.
        group: every rank of it must construct one.
    """

    def __init__(self, own_slice: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        slices, others, length = whole.chunk(group.size()), _others(group), own_slice.numel()
        _copy(slices[group.rank()], own_slice)
        arrivals = _ARRIVALS.setdefault(group, _Arrivals())
        rows = arrivals.take((len(others), length), own_slice.dtype)
        self._own_slice: Tensor | None = own_slice
        self._works: list[dist.Work] = []
        self._receives: list[list[tuple[dist.Work, Tensor]]] = []  # by part of the slice, from each rank
        with one_collective("reduce_scatter", whole.nbytes, group):
            for start in range(0, length, _PART):
                part = slice(start, start + _PART)
                self._works += [group.send([slices[rank][part]], rank, _REDUCE) for rank in others]
                receives = []
                for rank, row in zip(reversed(others), rows, strict=True):
                    receives.append((group.recv([row[part]], rank, _REDUCE), row[part]))
                self._receives.append(receives)
        _end_when_dropped(self, self._works)
        arrivals.in_flight = self

    def wait(self) -> None:
        """Wait until the sum is complete and the buffer may be written to. A second call does nothing."""
        self.add_up()
        _wait_for(self._works)

    def add_up(self) -> None:
        """Wait for the slices of the other ranks and add them up, which frees the receive buffer."""
        if self._own_slice is None:
            return
        own_slice, self._own_slice = self._own_slice, None
        for part, receives in zip(own_slice.split(_PART), self._receives, strict=True):
            total = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
            for work, arrived in receives:
                work.wait()
                total.add_(arrived)
            part.copy_(total)
        self._receives.clear()


class _Arrivals:
    """A group's receive buffer, for one reduce-scatter at a time.

    It is reused: allocating fresh memory takes longer than a transfer.

    Attributes:
        in_flight: the reduce-scatter that receives into it.
    """

    def __init__(self) -> None:
        self.in_flight: ReduceScatter | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the buffer, once the previous reduce-scatter has been added up."""
        if self.in_flight is not None:
            self.in_flight.add_up()
            self.in_flight = None
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


# Weak references by group: entries end with their group.
_ARRIVALS: WeakKeyDictionary[dist.ProcessGroup, _Arrivals] = WeakKeyDictionary()


def _others(group: dist.ProcessGroup) -> Sequence[int]:
    """The other ranks, starting with the next one, so that ranks do not all send to the same one at once."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _wait_for(works: list[dist.Work]) -> None:
    while works:  # wait for each only once: gloo would wait for another tensor
        works.pop().wait()


def _end_when_dropped(handle: object, works: list[dist.Work]) -> None:
    """Complete the sends when a handle is dropped without a wait, except at the end of the process."""

    def end() -> None:
        with suppress(RuntimeError):
            _wait_for(works)

    finalize(handle, end).atexit = False
