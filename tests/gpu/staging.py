"""Several ranks on one GPU: within `staging`, gloo sends pinned copies of their tensors on the host.

NCCL supports one rank per GPU. Here the copies are made on a separate stream without blocking the host. Results are
copied back at `wait()`, and the current stream waits for them. So an output is NaN until `wait()` (all bits set), and a
write to an input before `wait()` changes the message: a missing wait gives wrong numbers, as over NCCL.

It wraps the methods of torch's ProcessGroup, as late_completion.py does, for a group with gloo on both devices:
`launch_from_torch(backend="gloo")`. [Note: one order] gloo numbers its collectives when they begin, and those of copies
begin when the copies are complete. So all collectives, also of tensors on the host, begin in one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ..late_completion import METHODS, bytes_of, replaced, tensors_in

# Delay of a copy to the host in GPU cycles: about 50 µs, in which the main stream reaches kernels that might overwrite
# an input.
HELD_BACK = 100_000


@contextmanager
def staging(kind: str) -> Iterator[None]:
    """Send tensors of one kind of device, "cuda" or for a trial "cpu", by copies on the host."""
    with ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="staging"))
        for name in (method for method in (*METHODS, "barrier") if hasattr(dist.ProcessGroup, method)):
            begin = _staged(name, kind, thread)
            stack.enter_context(patch.object(dist.ProcessGroup, name, begin))
        yield


class StagedWork:
    """Communication in flight between copies on the host.

    Args:
        begun: the work of the copies, once it has begun.
        outputs: tensors that are written to, each with its copy.
        side: the stream of the copies.
    """

    def __init__(
        self, begun: "Future[dist.Work]", outputs: list[tuple[Tensor, Tensor]], side: torch.Stream | None
    ) -> None:
        self._begun, self._outputs, self._side = begun, outputs, side
        self._is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._begun.result(), name)

    def wait(self, *timeout: Any) -> bool:
        """Wait until the copies are filled; the current stream waits for the outputs. Repeated calls do nothing."""
        if self._is_done:
            return True
        self._begun.result().wait(*timeout)
        self._is_done = True
        with _on(self._side):
            for output, arrived in self._outputs:
                output.copy_(arrived, non_blocking=True)
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._outputs.clear()
        return True

    def is_completed(self) -> bool:
        """Return True once all data has arrived, in the order of the current stream."""
        if not self._is_done and self._begun.done() and self._begun.result().is_completed():
            self.wait()
        return self._is_done


def _staged(name: str, kind: str, thread: ThreadPoolExecutor) -> Callable[..., Any]:
    """Wrap a method of ProcessGroup so that it communicates copies of its tensors; see [Note: one order]."""
    method = getattr(dist.ProcessGroup, name)
    written_to, read = METHODS.get(name, ((), ()))

    def begin(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        outputs = [tensor for place in written_to for tensor in tensors_in(args[place])]
        inputs = [tensor for place in read for tensor in tensors_in(args[place])]
        staged = [tensor.detach() for tensor in (*outputs, *inputs) if tensor.device.type == kind]
        if not staged:
            return thread.submit(partial(method, group, *args, **kwargs)).result()
        side = _side_stream(staged[0].device)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(side.device))
        with _on(side):
            copies = {id(tensor): _host_copy(tensor, side) for tensor in (*outputs, *inputs)}
            _spoil(outputs, inputs, copies)
            ready = None if side is None else side.record_event()

        def transfer() -> dist.Work:
            if ready is not None:
                ready.synchronize()
            work: dist.Work = method(group, *replaced(args, copies), **kwargs)
            return work

        return StagedWork(
            thread.submit(transfer), [(output.data, copies[id(output)]) for output in outputs], side
        )

    return begin


_SIDES: dict[torch.device, torch.Stream] = {}


def _side_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream of the copies of a GPU, or None for a CPU."""
    if device.type != "cuda":
        return None
    if device not in _SIDES:
        _SIDES[device] = torch.cuda.Stream(device)
    return _SIDES[device]


def _on(side: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if side is None else torch.cuda.stream(side)  # type: ignore[arg-type]


def _host_copy(tensor: Tensor, side: torch.Stream | None) -> Tensor:
    """Return a copy on the host; a GPU's tensor is copied to pinned memory by the side stream."""
    tensor = tensor.detach()
    if side is None or tensor.device.type == "cpu":
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    torch.cuda._sleep(HELD_BACK)
    copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)  # else its memory might be freed earlier
    return copy


def _spoil(outputs: Sequence[Tensor], inputs: Sequence[Tensor], copies: dict[int, Tensor]) -> None:
    """Set all bits of the outputs, except for the input of a gather that lies in its output."""
    for output in outputs:
        bytes_of(output).fill_(0xFF)
    for tensor in inputs:
        if any(tensor.numel() < output.numel() for output in outputs):
            tensor.data.copy_(copies[id(tensor)], non_blocking=True)
