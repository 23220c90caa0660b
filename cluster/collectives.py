"""Differentiable collectives, in conjugate pairs. Process groups come from mesh.py.

Each moves activations between the layouts of one axis: replicated (R), split along a dim (S), partial sums
(P). The backward of each is the forward of its partner (arXiv:1909.08053 section 3, arXiv:2205.05198
section 4.2).

    copy_to         R -> R   backward: all-reduce     (the consumer has split weights: gradients are partial)
    reduce_from     P -> R   backward: identity
    scatter_to      R -> S   backward: all-gather
    gather_from     S -> R   backward: slice          (the consumer is replicated)
    gather_to       S -> R   backward: reduce-scatter (the consumer has split weights: gradients are partial)
    all_to_all      S -> S   backward: all-to-all     (split along another dim; arXiv:2309.14509)

A group of one rank communicates nothing. Every rank of a group must call, in the same order. Gradients of gradients
raise.

Activations, their gradients and flat buffers go through this file, on CPUs and on CUDA. Communication in flight is a
`Handle`. On CUDA it starts after all work enqueued on the current stream, and `wait` blocks the stream, not the host.

[Note: compiled collectives] While torch.compile traces a layer nothing is in flight: torch's functional collectives
become nodes of the graph, and `InFlight.wait` becomes the node that provides the result. The compiler orders them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function, function

from . import gloo, group_sum
from .profiling import named_collective, named_in

# torch 2.13 renamed these functions and warns of the old names. Remove this once 2.13 is the oldest supported.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


_functional = torch.ops._c10d_functional

Exchange = Callable[[Tensor], Tensor]
Result = TypeVar("Result")


class Handle(Protocol):
    """Communication in flight."""

    def wait(self) -> Any:
        """Wait for the communication; on CUDA the current stream waits, not the host."""
        ...


def unchanged(x: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return x


class InFlight(NamedTuple, Generic[Result]):
    """A tensor, the communication that fills it (None if it is filled already), and a function to apply to it then."""

    handle: Handle | None
    tensor: Tensor
    finish: Callable[[Tensor], Result] = unchanged  # type: ignore[assignment]

    def wait(self) -> Result:
        """Return the result. A CUDA stream waits for it, not the host."""
        if self.handle is not None:
            self.handle.wait()
        elif torch.compiler.is_compiling():
            return self.finish(_functional.wait_tensor(self.tensor))
        return self.finish(self.tensor)

    def finished_by(self, finish: Callable[[Tensor], Result]) -> "InFlight[Result]":
        """Apply this function to the tensor once it has arrived, in place of another one."""
        return InFlight(self.handle, self.tensor, finish)


@named_collective
def begin_all_gather(buffer: Tensor, local_slice: Tensor, group: dist.ProcessGroup) -> Handle:
    """Start an all-gather of the ranks' 1-D slices into a 1-D buffer, in the order of ranks."""
    if gloo.takes(buffer, group):
        return gloo.AllGather(buffer, local_slice, group)
    work: Handle = all_gather_single(buffer, local_slice, group=group, async_op=True)
    return work


@named_collective
def begin_reduce_scatter(local_slice: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> Handle:
    """Start a reduce-scatter: `local_slice` receives this rank's slice of the sum of all 1-D buffers."""
    if gloo.takes(buffer, group):
        return gloo.ReduceScatter(local_slice, buffer, group)
    work: Handle = reduce_scatter_single(local_slice, buffer, group=group, async_op=True)
    return work


def begin_gather(x: Tensor, group: dist.ProcessGroup) -> InFlight[Tensor]:
    """Start an all-gather of tensors of one shape, stacked to (T, *shape)."""
    if torch.compiler.is_compiling():
        row = x.unsqueeze(0).contiguous()
        return InFlight(None, _functional.all_gather_into_tensor(row, group.size(), group.group_name))
    rows = x.new_empty((group.size(), *x.shape))
    # Flat: gloo concatenates along dim 0 only.
    return InFlight(begin_all_gather(rows.view(-1), x.contiguous().view(-1), group), rows)


def begin_sum_of_rows(rows: Tensor, group: dist.ProcessGroup) -> InFlight[Tensor]:
    """Start a reduce-scatter of (T, *shape): this rank's row of the sum over ranks."""
    if torch.compiler.is_compiling():
        joined = rows.flatten(0, 1).contiguous()
        row = _functional.reduce_scatter_tensor(joined, "sum", group.size(), group.group_name)
        return InFlight(None, row)
    row_sum = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    return InFlight(begin_reduce_scatter(row_sum.view(-1), rows.contiguous().view(-1), group), row_sum)


def _all_reduce(x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    if torch.autograd._profiler_enabled():
        with named_in(group, "all_reduce"):
            return group_sum.all_reduce(x, group, async_op=async_op)
    return group_sum.all_reduce(x, group, async_op=async_op)


@named_collective
def _all_to_all(
    arrived: Tensor,
    sent: Tensor,
    received_rows: list[int] | None = None,
    sent_rows: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> None:
    dist.all_to_all_single(arrived, sent, received_rows, sent_rows, group=group)


def begin_all_reduce(x: Tensor, group: dist.ProcessGroup) -> InFlight[Tensor]:
    """Start `all_reduce` asynchronously."""
    if torch.compiler.is_compiling():
        return InFlight(None, _functional.all_reduce(x.contiguous(), "sum", group.group_name))
    total = x.clone(memory_format=torch.contiguous_format)
    return InFlight(_all_reduce(total, group, async_op=True), total)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over the group into a new tensor, bitwise equal on all ranks; no gradient."""
    return begin_all_reduce(x, group).wait()


def all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Concatenate the ranks' slices, all of one shape, along `dim`; no gradient."""
    return torch.cat(begin_gather(x, group).wait().unbind(0), dim)


def rank_slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's slice of `x` along `dim`, contiguous. The length must be divisible by the size of the group."""
    if x.shape[dim] % group.size():
        raise AssertionError(f"length {x.shape[dim]} of dim {dim} is not divisible by {group.size()} ranks")
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def sum_slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter `x` along `dim`: this rank's slice of the sum over the group; no gradient."""
    return begin_sum_of_rows(torch.stack(x.chunk(group.size(), dim)), group).wait()


def exchange_slices(x: Tensor, group: dist.ProcessGroup, split_dim: int, gather_dim: int) -> Tensor:
    """All-to-all: send slices of `x` along `split_dim`, concatenate those received along `gather_dim`.

    Without a gradient.

    Nothing is copied before sending if the slices are contiguous in memory, nor after it if all dims before
    `gather_dim` have length 1.
    """
    if x.shape[split_dim] % group.size():
        raise AssertionError(
            f"length {x.shape[split_dim]} of dim {split_dim} is not divisible by {group.size()} ranks"
        )
    slices = x.unflatten(split_dim, (group.size(), -1)).movedim(split_dim, 0).contiguous()
    if torch.compiler.is_compiling():
        sizes = [1] * group.size()
        arrived = _functional.all_to_all_single(slices, sizes, sizes, group.group_name)
        return _functional.wait_tensor(arrived).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)
    arrived = torch.empty_like(slices)
    _all_to_all(arrived.view(-1), slices.view(-1), group=group)
    return arrived.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of rows: the first `sent[0]` go to the first rank, and so on; no gradient.

    Args:
        x: the rows, in the order of the ranks that they go to.
        sent: number of rows for each rank.
        received: number of rows from each rank, in whose order they are returned.
        group: every rank of it must call.
    """
    arrived = x.new_empty(sum(received), *x.shape[1:])
    _all_to_all(arrived, x.contiguous(), received, sent, group=group)
    return arrived


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward as torch's `once_differentiable`, without its no-grad context where gradients are off."""
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


class _Pair(Function):
    """Apply one function to a tensor in forward and another one to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.run = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run(gradient), None, None


def paired(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """Apply `forward` to a tensor and `backward` to its gradient; gradients of gradients raise."""
    result: Tensor = _Pair.apply(x, forward, backward)
    return result


def _apply(x: Tensor, group: dist.ProcessGroup, forward: Exchange, backward: Exchange) -> Tensor:
    return x if group.size() == 1 else paired(x, forward, backward)


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward identity, backward all-reduce: the "f" of arXiv:1909.08053, section 3."""
    return _apply(x, group, _alias, lambda gradient: all_reduce(gradient, group))


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward all-reduce, backward identity: the "g" of arXiv:1909.08053, section 3.

    Args:
        x: becomes the sum. No backward may need its values: a matrix product, a sum, rows of an embedding.
        group: every rank of it must call.

    Returns:
        x itself if it is contiguous: as its gradient does not change, the sum needs no node of the graph.
    """
    if group.size() == 1:
        return x
    if not x.is_contiguous() or torch.compiler.is_compiling():
        return paired(x, lambda x: all_reduce(x, group), unchanged)
    _all_reduce(x.data, group)
    return x


def scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Forward this rank's slice of a replicated `x`, backward all-gather."""
    return _apply(
        x, group, lambda x: rank_slice(x, group, dim), lambda gradient: all_gather(gradient, group, dim)
    )


def gather_from(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Forward all-gather for a replicated consumer, backward this rank's slice."""
    return _apply(
        x, group, lambda x: all_gather(x, group, dim), lambda gradient: rank_slice(gradient, group, dim)
    )


def gather_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Forward all-gather for a consumer with split weights, backward reduce-scatter."""
    return _apply(
        x, group, lambda x: all_gather(x, group, dim), lambda gradient: sum_slice(gradient, group, dim)
    )


def all_to_all(x: Tensor, group: dist.ProcessGroup, *, split_dim: int, gather_dim: int) -> Tensor:
    """Forward turns slices along `gather_dim` into slices along `split_dim`; backward reverses this.

    Args:
        x: this rank's slice along `gather_dim`, of full length along `split_dim`; that length must be
            divisible by the group's size.
        group: every rank of it must call.
        split_dim, gather_dim: counted from 0, and different.

    Returns:
        This rank's slice along `split_dim`, of full length along `gather_dim`.
    """
    return _apply(
        x,
        group,
        lambda x: exchange_slices(x, group, split_dim, gather_dim),
        lambda gradient: exchange_slices(gradient, group, gather_dim, split_dim),
    )


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)
