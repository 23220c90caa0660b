"""Simulation of CUDA for `host_memory` on a machine without a GPU: records which host memory is registered."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from echelon.cluster.device import host_memory


class Registered:
    """Host memory that is registered with CUDA, and the calls in order.

    Attributes:
        sizes: bytes of each registered block, by address.
        done: ("register", bytes), ("wait", 0) for the device, ("unregister", bytes).
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.done: list[tuple[str, int]] = []

    @property
    def nbytes(self) -> int:
        """Return the number of registered bytes."""
        return sum(self.sizes.values())

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Simulate cudaHostRegister."""
        assert flags == 0 and address not in self.sizes
        self.sizes[address] = nbytes
        self.done.append(("register", nbytes))
        return 0

    def unregister(self, address: int) -> int:
        """Simulate cudaHostUnregister; the memory must still exist."""
        ctypes.c_uint8.from_address(address).value = 1
        self.done.append(("unregister", self.sizes.pop(address)))
        return 0

    def wait(self, device: torch.device) -> None:
        """Simulate torch.cuda.synchronize."""
        self.done.append(("wait", 0))


@contextmanager
def registered_memory(*users: ModuleType) -> Iterator[Registered]:
    """Let modules allocate host memory as if their device were CUDA; on exit no memory may still be registered."""
    registered = Registered()
    cudart = SimpleNamespace(cudaHostRegister=registered.register, cudaHostUnregister=registered.unregister)
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch.cuda, "cudart", lambda: cudart))
        patches.enter_context(patch.object(torch.cuda, "synchronize", registered.wait))
        for module in users:
            patches.enter_context(patch.object(module, "host_memory", _of_cuda(host_memory)))
        yield registered
        gc.collect()
        assert not registered.sizes, "memory stays pinned"


def _of_cuda(make: Callable[[int, torch.device], Tensor]) -> Callable[[int, torch.device], Tensor]:
    return lambda nbytes, device: make(nbytes, torch.device("cuda", 0))
