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
from .whereabouts import DescribedCollective

# Shorter buffers gain nothing. Tests patch this: 0 sends slices of all buffers, infinity of none.
MIN_BYTES: float = 2**16
# Elements added at a time, while the next are in flight: they fit a core's cache.
_CHUNK = 2**18
_GATHER, _REDUCE = 2**20, 2**20 + 1  # message tags, different from those of ring.py


def takes(buffer: Tensor, group: dist.ProcessGroup) -> bool:
    """Return True for a long buffer on a CPU over gloo, which is communicated in slices. Equal on all ranks."""
    if buffer.device.type != "cpu" or buffer.nbytes < MIN_BYTES or group.size() == 1:
        return False
    return bool(group._get_backend(buffer.device).name() == "gloo")


class AllGather(DescribedCollective):
    """An all-gather in flight: each rank sends its slice to all others. The constructor starts it.

    Args:
        buffer: filled with the slices of all ranks; `local_slice` may be this rank's slice of it.
        local_slice: contiguous, of the same length on all ranks.
        group: every rank of it must construct one.
    """

    activity = "all-gathering slices"

    def __init__(self, buffer: Tensor, local_slice: Tensor, group: dist.ProcessGroup) -> None:
        slices, others, self.group = buffer.chunk(group.size()), _others(group), group
        with one_collective("all_gather", buffer.nbytes, group):
            self._works = [group.recv([slices[rank]], rank, _GATHER) for rank in reversed(others)]
            self._works += [group.send([local_slice], rank, _GATHER) for rank in others]
        _copy_unless_same(local_slice, slices[group.rank()])
        _complete_when_dropped(self, self._works)

    def wait(self) -> None:
        """Wait until the buffer is filled and may be written to. A second call does nothing."""
        _wait_for(self._works)


class ReduceScatter(DescribedCollective):
    """A reduce-scatter in flight: each rank receives and adds up its slice of all buffers. The constructor starts it.

    16-bit formats are added up in float32.

    Args:
        local_slice: receives this rank's slice of the sum. It may be that slice of `buffer`; the rest is kept.
        buffer: this rank's addends.
        group: every rank of it must construct one.
    """

    activity = "reduce-scattering slices"

    def __init__(self, local_slice: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self.group = group
        slices, others, length = buffer.chunk(group.size()), _others(group), local_slice.numel()
        _copy_unless_same(slices[group.rank()], local_slice)  # the first addend
        receive_buffer = _RECEIVE_BUFFERS.setdefault(group, _ReceiveBuffer())
        rows = receive_buffer.take((len(others), length), local_slice.dtype)
        self._local_slice: Tensor | None = local_slice
        self._sends: list[dist.Work] = []
        self._receives: list[list[tuple[dist.Work, Tensor]]] = []  # by chunk of the slice, from each rank
        with one_collective("reduce_scatter", buffer.nbytes, group):
            for start in range(0, length, _CHUNK):
                chunk = slice(start, start + _CHUNK)
                self._sends += [group.send([slices[rank][chunk]], rank, _REDUCE) for rank in others]
                receives = []
                # The previous rank sends to this one first.
                for rank, row in zip(reversed(others), rows, strict=True):
                    receives.append((group.recv([row[chunk]], rank, _REDUCE), row[chunk]))
                self._receives.append(receives)
        _complete_when_dropped(self, self._sends)
        receive_buffer.in_flight = self

    def wait(self) -> None:
        """Wait until the sum is complete and the buffer may be written to. A second call does nothing."""
        self.add_up()
        _wait_for(self._sends)

    def add_up(self) -> None:
        """Wait for the slices of the other ranks and add them up, which frees the receive buffer."""
        if self._local_slice is None:
            return
        local_slice, self._local_slice = self._local_slice, None
        for chunk, receives in zip(local_slice.split(_CHUNK), self._receives, strict=True):
            total = chunk.float() if chunk.dtype in (torch.bfloat16, torch.float16) else chunk
            for work, arrived in receives:
                work.wait()
                total.add_(arrived)
            chunk.copy_(total)
        self._receives.clear()


class _ReceiveBuffer:
    """A group's receive buffer, for one reduce-scatter at a time.

    It is reused: allocating fresh memory takes longer than a transfer.

    Attributes:
        in_flight: the reduce-scatter that receives into it.
    """

    def __init__(self) -> None:
        self.in_flight: ReduceScatter | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the buffer, once the previous reduce-scatter has been added up."""
        if self.in_flight is not None:
            self.in_flight.add_up()
            self.in_flight = None
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(dtype).view(shape)


# Weak references by group: entries end with their group.
_RECEIVE_BUFFERS: WeakKeyDictionary[dist.ProcessGroup, _ReceiveBuffer] = WeakKeyDictionary()


def _others(group: dist.ProcessGroup) -> Sequence[int]:
    """The other ranks, starting with the next one, so that ranks do not all send to the same one at once."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _copy_unless_same(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _wait_for(works: list[dist.Work]) -> None:
    while works:  # wait for each only once: gloo would wait for another tensor
        works.pop().wait()


def _complete_when_dropped(handle: object, works: list[dist.Work]) -> None:
    """Wait for sends and receives when a handle is dropped without a wait, except at the end of the process."""

    def complete() -> None:
        with suppress(RuntimeError):
            _wait_for(works)

    finalize(handle, complete).atexit = False
