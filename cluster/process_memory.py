"""Other processes of this machine: their memory, read without their doing, and lines to them (messages.py).

What is read when is exchange.py's, read_sums.py's and direct.py's.

[Note: reading instead of sending] Linux lets a process copy from another one of the same user
(process_vm_readv(2)): one copy, where sockets make two and wake both ends up. exchange.py says what that saves. Between
machines or containers, where the kernel forbids it, and elsewhere than on Linux, nothing can be read.
"""

import ctypes
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import gather_integers
from .mesh import default_timeout
from .messages import Messages, knock, open_door


class _Extent(ctypes.Structure):
    """A stretch of memory, as the kernel takes it."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Neighbours(NamedTuple):
    """The processes of a group, all of which can read each other's memory.

    Args:
        pids: by rank in the group.
        messages: the lines from this one to the others.
    """

    pids: Mapping[int, int]
    messages: Messages = Messages({}, {})

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Fill a contiguous tensor from an address in the process of a rank, which must not change it meanwhile.

        Raises:
            ConnectionError: the process is gone, or has no such memory.
        """
        start, missing = into.data_ptr(), into.nbytes
        while missing:
            done = _read(self.pids[rank], address, start, missing)
            if done <= 0:
                why = os.strerror(ctypes.get_errno())
                raise ConnectionError(
                    f"the memory of rank {rank} of the group (process {self.pids[rank]}): {why}"
                )
            start, address, missing = start + done, address + done, missing - done


def find_neighbours(group: dist.ProcessGroup) -> Neighbours | None:
    """The processes of the group, None where one cannot read all others. Two all-gathers of a few integers.

    Every rank reads a random number from every other one: an equal process number on another machine is no
    neighbour. The lines to them are new ones.
    """
    number = secrets.randbits(62)
    token = torch.tensor([number])
    later = range(group.rank() + 1, group.size())
    with ExitStack() as stack:
        door = open_door(number, len(later)) if _PROCESS_VM_READV else None
        if door is not None:
            stack.callback(door.close)
        every = gather_integers((os.getpid(), token.data_ptr(), number), group, "connecting the ranks")
        pids = {rank: pid for rank, (pid, _, _) in enumerate(every)}
        found = Neighbours(pids)
        is_near = door is not None and all(
            _holds(found, rank, address, number) for rank, (_, address, number) in enumerate(every)
        )
        earlier = {rank: knock(every[rank][2]) if is_near else None for rank in range(group.rank())}
        lines = {rank: stack.enter_context(line) for rank, line in earlier.items() if line is not None}
        is_near = is_near and len(lines) == len(earlier)
        if not all(
            near for (near,) in gather_integers((int(is_near),), group, "connecting the ranks")
        ):  # before the token is gone
            return None
        assert door is not None  # or this process would not be near
        lines |= door.let_in({pids[rank]: rank for rank in later})
        stack.pop_all()
        door.close()
    return Neighbours(pids, Messages(lines, pids, default_timeout().total_seconds()))


def _holds(neighbours: Neighbours, rank: int, address: int, number: int) -> bool:
    read = torch.zeros(1, dtype=torch.int64)
    try:
        neighbours.read(rank, address, read)
    except ConnectionError:
        return False
    return read.item() == number


def _read(pid: int, address: int, to: int, nbytes: int) -> int:
    """Bytes that the kernel copied, at most so many; -1 where it cannot."""
    if _PROCESS_VM_READV is None:
        return -1
    here, there = _Extent(to, nbytes), _Extent(address, nbytes)
    return int(_PROCESS_VM_READV(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


def _find_system_call() -> Any:
    """The C library's process_vm_readv, None where it has none."""
    call = (
        getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None) if os.name == "posix" else None
    )
    if call is not None:
        call.restype = ctypes.c_ssize_t
        extents = (ctypes.c_void_p, ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *extents, *extents, ctypes.c_ulong)
    return call


_PROCESS_VM_READV = _find_system_call()
