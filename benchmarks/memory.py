"""What a contender holds, and the most that it needs, in bytes of tensors. Times are rounds.py.

Each is counted alone, while no other is in memory, by torch's allocator and not by the system: all contenders
share their processes, whose resident memory shows the largest and what malloc has kept of it.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from contender import Contender
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

# Steps before the one that is counted: the first makes the optimizer's states, and after it DDP lays out its
# buckets anew.
_SETTLING = 2
_COUNTED = "the step that is counted"


class Holder(Contender, Protocol):
    """A contender that shows its tensors."""

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """What this rank holds, by kind; tensors may share memory."""


def measure_memory(makers: Sequence[Callable[[], Holder]], device: torch.device) -> dict[str, dict[str, int]]:
    """Bytes of each contender, the largest of all ranks. Communicates.

    Returns:
        By contender: for each kind of its tensors what lies on the rank between backward and the optimizer's
        step, and "peak": the most that was allocated at any moment of a step, activations and all.
    """
    found = {}
    for make in makers:
        gc.collect()
        name, own = _measure(make, device)
        largest = torch.tensor(list(own.values()), dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found[name] = dict(zip(own, largest.tolist(), strict=True))
    return found


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory behind some tensors, shared memory once; of a DTensor what is on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _measure(make: Callable[[], Holder], device: torch.device) -> tuple[str, dict[str, int]]:
    held = {}

    def build() -> Holder:
        contender = make()
        for _ in range(_SETTLING):
            contender.compute()
            contender.update()
        return contender

    def step(contender: Holder) -> str:
        contender.compute()
        held.update({kind: held_bytes(tensors) for kind, tensors in contender.tensors().items()})
        contender.update()
        return contender.name

    peak = _peak_on_cuda if device.type == "cuda" else _peak_on_cpu
    name, most = peak(build, step, device)
    return name, held | {"peak": most}


def _peak_on_cpu(
    build: Callable[[], Holder], step: Callable[[Holder], str], device: torch.device
) -> tuple[str, int]:
    """What `step` returns, and the most that was allocated in it of all that was since `build` began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        contender = build()
        with record_function(_COUNTED):
            name = step(contender)
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = recorded.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _COUNTED)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = present = sum(size for moment, size in changes if moment < start)
    for moment, size in changes:
        if moment >= start:
            present += size
            most = max(most, present)
    return name, most


def _peak_on_cuda(
    build: Callable[[], Holder], step: Callable[[Holder], str], device: torch.device
) -> tuple[str, int]:
    before = torch.cuda.memory_allocated(device)
    contender = build()
    torch.cuda.reset_peak_memory_stats(device)
    name = step(contender)
    return name, torch.cuda.max_memory_allocated(device) - before
