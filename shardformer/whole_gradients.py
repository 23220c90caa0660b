"""Gradients that are whole once a backward has ended, without a booster: by hooks. With one, zero/ sees to it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..cluster.agreement import gather_integers
from ..cluster.collectives import all_gather, all_reduce
from ..cluster.placement import Shard, Shared, placement_of

_AXES = "_echelon_axes"
_BUCKET = 2**22  # elements that are averaged together
_FLAGS = 62  # of a 64-bit integer


@dataclass(frozen=True)
class Axes:
    """Over which ranks a model's gradients are whole without a booster; None is an axis of one rank.

    Args:
        tensor: the ranks that hold different pieces.
        data: the ranks that hold equal pieces and train on different batches.
        average: what averages over `data`.
    """

    tensor: ProcessGroup | None
    data: ProcessGroup | None
    average: "DataAverage | None"


def axes_of(model: nn.Module) -> Axes | None:
    """The axes of a model that `make_gradients_whole` was called for, else None."""
    axes: Axes | None = vars(model).get(_AXES)
    return axes


def is_split(model: nn.Module) -> bool:
    """Whether a plugin or ShardFormer had the model: it holds pieces, or hooks that make its gradients whole."""
    return axes_of(model) is not None or any(placement_of(each) is not None for each in model.parameters())


def make_gradients_whole(model: nn.Module, *, tensor: ProcessGroup | None, data: ProcessGroup | None) -> None:
    """Let every backward leave gradients as one process has them: this rank's piece of each. By hooks.

    Over the tensor axis, gradients that are a part on each rank (norms inside a region, copies of key-value heads)
    are summed when autograd has the whole one of a backward, so accumulating over several counts none twice. Over the
    data axis, all are averaged at the end of a backward. A backward then is collective over both axes: every rank calls
    it, with a graph that is the same on all ranks of the tensor axis. Also for parameters that are frozen today.

    Args:
        model: already split.
        tensor: the tensor axis; None is one rank.
        data: the data axis; None is one rank.
    """
    if tensor is None and data is None:
        return
    parameters = list(model.parameters())
    if tensor is not None:
        for parameter in parameters:
            if (num_parts := _num_parts(parameter)) > 1:
                with _requiring_gradient(parameter):
                    parameter.register_hook(_summing(tensor, num_parts))
    average = None if data is None else DataAverage(parameters, data)
    vars(model)[_AXES] = Axes(tensor, data, average)


class DataAverage:
    """Averages gradients over the data axis at the end of each backward.

    Averaging twice changes nothing, so what was averaged before may be accumulated to. A parameter that only some
    ranks have a gradient for counts as zero on the others.

    Args:
        parameters: all of the model, in one order on all ranks.
        group: the data axis.
    """

    def __init__(self, parameters: Iterable[Parameter], group: ProcessGroup) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._backward = -1  # the one that ends with an average
        for parameter in self._parameters:
            with _requiring_gradient(parameter):
                # Weakly: the garbage collector does not see through the hooks of a tensor.
                parameter.register_post_accumulate_grad_hook(_noting(WeakMethod(self._note)))

    def _note(self) -> None:
        """A backward has brought a gradient; the first of each one queues the average."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # by its number, since one that breaks off ends without the average
            self._backward = backward
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """All-gather of one bit per parameter, all-reduce of the gradients that any rank has."""
        present = self._present()
        gradients = []
        for parameter, is_present in zip(self._parameters, present, strict=True):
            if is_present:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            # In float32 also for 16 bits, whose sum over many ranks would lose digits.
            flat = torch.cat([gradient.float().flatten() for gradient in bucket])
            mean = all_reduce(flat, self._group) / self._group.size()
            for gradient, piece in zip(bucket, mean.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def _present(self) -> list[bool]:
        """Which parameters have a gradient on any rank. All-gather."""
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        words = [
            sum(flag << place for place, flag in enumerate(has_gradient[first : first + _FLAGS]))
            for first in range(0, len(has_gradient), _FLAGS)
        ]
        found = gather_integers(words, self._group)
        return [
            any(rank[index // _FLAGS] >> (index % _FLAGS) & 1 for rank in found)
            for index in range(len(has_gradient))
        ]


def _num_parts(parameter: Parameter) -> int:
    """How many neighbouring ranks of the tensor axis have a part each of a parameter's gradient."""
    placement = placement_of(parameter)
    if isinstance(placement, Shared):
        return placement.size
    return placement.copies if isinstance(placement, Shard) else 1


def _summing(group: ProcessGroup, num_parts: int) -> Callable[[Tensor], Tensor]:
    """A hook that sums a gradient over so many neighbours of a group."""

    def summed(gradient: Tensor) -> Tensor:
        if num_parts == group.size():
            return all_reduce(gradient, group)
        # Among all, for want of a group of these alone: making one would be collective over the world.
        first = group.rank() // num_parts * num_parts
        return all_gather(gradient[None], group, 0)[first : first + num_parts].sum(0)

    return summed


def _noting(note: WeakMethod) -> Callable[[Tensor], None]:
    def accumulated(parameter: Tensor) -> None:
        if (method := note()) is not None:
            method()

    return accumulated


@contextmanager
def _requiring_gradient(parameter: Parameter) -> Iterator[None]:
    """Hooks need a parameter that requires a gradient, and stay when it is frozen again."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(is_trained)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients in turn, so many together as a bucket takes."""
    bucket: list[Tensor] = []
    filled = 0
    for gradient in gradients:
        if bucket and filled + gradient.numel() > _BUCKET:
            yield bucket
            bucket, filled = [], 0
        bucket.append(gradient)
        filled += gradient.numel()
    if bucket:
        yield bucket
