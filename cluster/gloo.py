"""Reduce-scatter and all-gather over gloo as slices that go from rank to rank. collectives.py says where they do.

[Note: slices] gloo's own reduce-scatter and all-gather copy whole buffers first: of 128 MiB on two ranks (2 cores) they
took 236 and 188 ms, and slices that are sent take 52 and 45. Each rank sends every other one its slice, which sums up
itself. As with NCCL, what has begun ends without another rank waiting for it.
"""

from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from .traffic import one_collective

# Shorter buffers gain nothing. A test that patches this to 0 sends slices of all, to infinity of none.
MIN_BYTES: float = 2**16
# Elements that are summed up at a time, while the next are in flight: they stay in a core's cache.
_PART = 2**18
_GATHER, _REDUCE = 2**20, 2**20 + 1  # tags; those of ring.py are others


def takes(whole: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a buffer goes by slices: a long one on CPUs, over gloo. Equal on all ranks."""
    if whole.device.type != "cpu" or whole.nbytes < MIN_BYTES or group.size() == 1:
        return False
    return bool(group._get_backend(whole.device).name() == "gloo")


class AllGather:
    """The slices of all ranks on their way into the 1-D buffers of all. Making it begins.

    Args:
        whole: the buffer; `own_slice` may be this rank's slice of it.
        own_slice: contiguous, of one length on all ranks.
        group: every rank of it makes one.
    """

    def __init__(self, whole: Tensor, own_slice: Tensor, group: dist.ProcessGroup) -> None:
        slices, others = whole.chunk(group.size()), _others(group)
        with one_collective("all_gather", whole.nbytes, group):
            self._works = [group.recv([slices[rank]], rank, _GATHER) for rank in reversed(others)]
            self._works += [group.send([own_slice], rank, _GATHER) for rank in others]
        _copy(own_slice, slices[group.rank()])
        _end_when_dropped(self, self._works)

    def wait(self) -> None:
        """Return when the buffer is filled and may be written to. Once more does nothing."""
        _wait_for(self._works)


class ReduceScatter:
    """The sum of the 1-D buffers of all ranks on its way, slice by slice, to the ranks. Making it begins.

    16-bit formats are added up in float32.

    Args:
        own_slice: becomes this rank's slice of the sum; it may be that slice of `whole`, the rest of which stays.
        whole: the buffer.
        group: every rank of it makes one.
    """

    def __init__(self, own_slice: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        slices, others, length = whole.chunk(group.size()), _others(group), own_slice.numel()
        _copy(slices[group.rank()], own_slice)
        arrivals = _ARRIVALS.setdefault(group, _Arrivals())
        rows = arrivals.take((len(others), length), own_slice.dtype)
        self._own_slice: Tensor | None = own_slice
        self._works: list[dist.Work] = []
        self._receives: list[list[tuple[dist.Work, Tensor]]] = []
        with one_collective("reduce_scatter", whole.nbytes, group):
            for start in range(0, length, _PART):
                part = slice(start, start + _PART)
                self._works += [group.send([slices[rank][part]], rank, _REDUCE) for rank in others]
                targets = zip(reversed(others), (row[part] for row in rows), strict=True)
                self._receives.append([(group.recv([into], rank, _REDUCE), into) for rank, into in targets])
        _end_when_dropped(self, self._works)
        arrivals.in_flight = self

    def wait(self) -> None:
        """Return when the sum is there, and the buffer may be written to. Once more does nothing."""
        self.add_up()
        _wait_for(self._works)

    def add_up(self) -> None:
        """Wait for the slices of the others, and add them up: the memory where they arrived is free then."""
        if self._own_slice is None:
            return
        own_slice, self._own_slice = self._own_slice, None
        for own, receives in zip(own_slice.split(_PART), self._receives, strict=True):
            total = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
            for work, arrived in receives:
                work.wait()
                total.add_(arrived)
            own.copy_(total)
        self._receives.clear()


class _Arrivals:
    """The memory of a group for slices that arrive to be added up, for one reduce-scatter at a time.

    It is kept: a process pays more for fresh memory than for a transfer.

    Attributes:
        in_flight: whose slices arrive there.
    """

    def __init__(self) -> None:
        self.in_flight: ReduceScatter | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Have the memory once what came before is added up."""
        if self.in_flight is not None:
            self.in_flight.add_up()
            self.in_flight = None
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


# By group, as long as that lives; none refers back to its group.
_ARRIVALS: WeakKeyDictionary[dist.ProcessGroup, _Arrivals] = WeakKeyDictionary()


def _others(group: dist.ProcessGroup) -> Sequence[int]:
    """The other ranks, from the next one on: where all go by this order, nobody is sent to by all at once."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _wait_for(works: list[dist.Work]) -> None:
    while works:  # each once: gloo would wait for a further tensor
        works.pop().wait()


def _end_when_dropped(handle: object, works: list[dist.Work]) -> None:
    """Let slices reach the other ranks though nobody waits for the handle; not where the process ends."""

    def end() -> None:
        with suppress(RuntimeError):
            _wait_for(works)

    finalize(handle, end).atexit = False
