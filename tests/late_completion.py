"""Communication that completes late: over gloo, what would be a race on a stream of NCCL's is an error here.

gloo may have done before anybody waits, and may have sent at once what it is given. Within `late_completion` an output
holds NaN until `wait` has returned (all bits set; in integers −1), and at `wait` every input must be what it was when
the communication began. It wraps the methods of torch's ProcessGroup, which all functions of torch.distributed come to.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

# By method: the places of its arguments that are written to, and of those that are read alone. torch 2.13 renamed
# some, and has both; the older names can go once it is the oldest torch allowed.
METHODS = {
    "allreduce": ((0,), ()),
    "broadcast": ((0,), ()),
    "all_gather_single": ((0,), (1,)),
    "_allgather_base": ((0,), (1,)),
    "reduce_scatter_single": ((0,), (1,)),
    "_reduce_scatter_base": ((0,), (1,)),
    "all_to_all_single": ((0,), (1,)),
    "alltoall_base": ((0,), (1,)),
    "allgather": ((0,), (1,)),
    "recv": ((0,), ()),
    "send": ((), (0,)),
}


@contextmanager
def late_completion() -> Iterator[None]:
    """Let all that this process communicates complete late.

    Raises:
        AssertionError: a tensor was written to in flight; at the end, so that no other rank waits for this one.
    """
    faults: list[str] = []
    with ExitStack() as stack:
        for name in (each for each in METHODS if hasattr(dist.ProcessGroup, each)):
            stack.enter_context(patch.object(dist.ProcessGroup, name, _late(name, faults)))
        try:
            yield
        except Exception as error:
            if faults:
                raise AssertionError("\n".join(faults)) from error
            raise
    if faults:
        raise AssertionError("\n".join(faults))


class LateWork:
    """Communication in flight between copies of the tensors it is about. See `late_completion`.

    Args:
        work: of the copies.
        inputs: tensors that are read alone.
        outputs: tensors that are written to, each with its copy.
        what: names the communication.
        faults: where it says that a tensor was written to.
    """

    def __init__(
        self,
        work: dist.Work,
        *,
        inputs: list[Tensor],
        outputs: list[tuple[Tensor, Tensor]],
        what: str,
        faults: list[str],
    ) -> None:
        self._work, self._outputs, self._what, self._faults = work, outputs, what, faults
        self._held = [("an input", tensor, tensor.clone()) for tensor in inputs]
        self._held += [("an output", tensor, tensor.clone()) for tensor, _ in outputs]
        self._is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *timeout: Any) -> bool:
        """Wait, look whether the tensors are as they were, and fill the outputs. Once more does nothing."""
        if self._is_done:
            return True
        self._work.wait(*timeout)
        self._is_done = True
        for which, tensor, held in self._held:
            if not torch.equal(bytes_of(tensor), bytes_of(held)):
                self._faults.append(f"{which} of {self._what} was written to before wait()")
        for output, arrived in self._outputs:
            output.copy_(arrived)
        self._held.clear()
        self._outputs.clear()
        return True


def _late(name: str, faults: list[str]) -> Callable[..., LateWork]:
    """A method of ProcessGroup, between copies of its tensors."""
    method = getattr(dist.ProcessGroup, name)
    written_to, read = METHODS[name]

    def begin(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> LateWork:
        outputs = [tensor for place in written_to for tensor in tensors_in(args[place])]
        inputs = [tensor for place in read for tensor in tensors_in(args[place])]
        copies = {id(tensor): tensor.detach().clone() for tensor in (*outputs, *inputs)}
        work = method(group, *replaced(args, copies), **kwargs)
        for output in outputs:
            bytes_of(output).fill_(0xFF)
        for tensor in inputs:
            if any(
                tensor.numel() < output.numel() for output in outputs
            ):  # a gather leaves what it sends in place
                tensor.data.copy_(copies[id(tensor)])
        return LateWork(
            work,
            inputs=[tensor.data for tensor in inputs],
            outputs=[(tensor.data, copies[id(tensor)]) for tensor in outputs],
            what=f"{name} at {_where()}",
            faults=faults,
        )

    return begin


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested lists."""
    return [tree] if isinstance(tree, Tensor) else [tensor for each in tree for tensor in tensors_in(each)]


def replaced(tree: Any, copies: dict[int, Tensor]) -> Any:
    """The same with copies of the tensors."""
    if isinstance(tree, list | tuple):
        return type(tree)(replaced(each, copies) for each in tree)
    return copies.get(id(tree), tree)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.data.view(-1).view(torch.uint8)  # `data` counts no writes


def _where() -> str:
    """The innermost lines outside of torch, from the last one outwards."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 4:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            found.append(f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
