"""Delayed completion of communication: races that would occur on NCCL's streams become errors over gloo.

gloo may complete a communication before `wait`, and may send its input at once. Within `late_completion` an output
is NaN until `wait` has returned (all bits set; −1 for integers), and at `wait` every input must be unchanged since the
call. It wraps the methods of torch's ProcessGroup, which all functions of torch.distributed call.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

# Positions of the written and of the read-only arguments by method. torch 2.13 renamed some methods and has both names;
# the older ones can go once it is the oldest torch allowed.
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
    """Delay the completion of all communication of this process.

    Raises:
        AssertionError: a tensor was modified in flight; raised on exit, so no other rank waits for this one.
    """
    errors: list[str] = []
    with ExitStack() as stack:
        for name in (method for method in METHODS if hasattr(dist.ProcessGroup, method)):
            stack.enter_context(patch.object(dist.ProcessGroup, name, _late(name, errors)))
        try:
            yield
        except Exception as error:
            if errors:
                raise AssertionError("\n".join(errors)) from error
            raise
    if errors:
        raise AssertionError("\n".join(errors))


class LateWork:
    """Communication in flight on copies of its tensors. See `late_completion`.

    Args:
        work: the work handle of the copies.
        inputs: tensors that are only read.
        outputs: tensors that are written to, each with its copy.
        what: name of the communication, for errors.
        errors: list that collects the errors.
    """

    def __init__(
        self,
        work: dist.Work,
        *,
        inputs: list[Tensor],
        outputs: list[tuple[Tensor, Tensor]],
        what: str,
        errors: list[str],
    ) -> None:
        self._work, self._outputs, self._what, self._errors = work, outputs, what, errors
        self._held = [("an input", tensor, tensor.clone()) for tensor in inputs]
        self._held += [("an output", tensor, tensor.clone()) for tensor, _ in outputs]
        self._is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *timeout: Any) -> bool:
        """Wait, check that the tensors are unchanged, and fill the outputs. Repeated calls do nothing."""
        if self._is_done:
            return True
        self._work.wait(*timeout)
        self._is_done = True
        for which, tensor, held in self._held:
            if not torch.equal(bytes_of(tensor), bytes_of(held)):
                self._errors.append(f"{which} of {self._what} was written to before wait()")
        for output, arrived in self._outputs:
            output.copy_(arrived)
        self._held.clear()
        self._outputs.clear()
        return True


def _late(name: str, errors: list[str]) -> Callable[..., LateWork]:
    """Wrap a method of ProcessGroup so that it communicates copies of its tensors."""
    method = getattr(dist.ProcessGroup, name)
    written_to, read = METHODS[name]

    def begin(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> LateWork:
        outputs = [tensor for place in written_to for tensor in tensors_in(args[place])]
        inputs = [tensor for place in read for tensor in tensors_in(args[place])]
        if any(tensor.is_meta for tensor in (*outputs, *inputs)):  # has no values that could be late
            return method(group, *args, **kwargs)
        copies = {id(tensor): tensor.detach().clone() for tensor in (*outputs, *inputs)}
        work = method(group, *replaced(args, copies), **kwargs)
        for output in outputs:
            bytes_of(output).fill_(0xFF)
        for tensor in inputs:
            if any(
                tensor.numel() < output.numel() for output in outputs
            ):  # a gather does not modify its input
                tensor.data.copy_(copies[id(tensor)])
        return LateWork(
            work,
            inputs=[tensor.data for tensor in inputs],
            outputs=[(tensor.data, copies[id(tensor)]) for tensor in outputs],
            what=f"{name} at {_where()}",
            errors=errors,
        )

    return begin


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists."""
    return (
        [tree] if isinstance(tree, Tensor) else [tensor for subtree in tree for tensor in tensors_in(subtree)]
    )


def replaced(tree: Any, copies: dict[int, Tensor]) -> Any:
    """Return nested lists with their tensors replaced by the copies."""
    if isinstance(tree, list | tuple):
        return type(tree)(replaced(subtree, copies) for subtree in tree)
    return copies.get(id(tree), tree)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.data.view(-1).view(torch.uint8)  # writes through `data` do not change the version counter


def _where() -> str:
    """Return the innermost stack lines outside of torch, innermost first."""
    frame, places = sys._getframe(1), []
    while frame is not None and len(places) < 4:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            places.append(f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)
