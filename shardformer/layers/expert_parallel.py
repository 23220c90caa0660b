"""Expert parallelism: every rank has some of the experts, and tokens travel to their experts and back.

[Note: dispatch] The module of experts stays as it is, and so does its forward. A hook before it sorts pairs of a token
and an expert by expert and sends them to the ranks of the experts; the native forward computes with the rank's experts
on the rows that arrive; a hook after it sends the results back, where they are weighted and added (arXiv:2006.16668,
section 2.2, without a capacity: no token is dropped). A forward has three all-to-alls, one of them of counts, and
reads the numbers of rows once on the host; a backward has two and reads nothing.

Every rank takes part in each exchange, however few tokens or rows it has. Without rows, the experts compute one of
zeros whose result nobody uses, so that all ranks have the same graph.

[Note: replayed choices] A recomputed forward must send the same rows. Rounding may differ in it, so that a router would
choose other experts, and the gradients would be wrong without an error. `Choices` saves what `topk` or `max` chose in
forward, and the numbers of rows; recomputation takes them from there, without another exchange of counts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _pop_mode,
    _push_mode,
    handle_torch_function,
    has_torch_function_unary,
)

from ...cluster.collectives import exchange_rows, paired
from .parallel_module import change_inputs


class Rows(NamedTuple):
    """The rows of one exchange.

    Args:
        sent: number of rows sent to each rank.
        received: number of rows received from each rank.
        counts_PE: rows received from each rank P for each expert E of this rank.
    """

    sent: list[int]
    received: list[int]
    counts_PE: Tensor


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup) -> Rows:
    """Exchange the numbers of rows. All-to-all of P·E integers; waits for the device.

    Args:
        counts_PE: rows of this rank for each expert E of each rank P.
        group: the expert axis.
    """
    if has_torch_function_unary(counts_PE):
        rows: Rows = handle_torch_function(exchange_counts, (counts_PE,), counts_PE, group)
        return rows
    ones = [1] * group.size()
    arrived_PE = exchange_rows(counts_PE, ones, ones, group)
    sent, received = torch.stack([counts_PE.sum(1), arrived_PE.sum(1)]).tolist()
    return Rows(sent, received, arrived_PE)


class _Dispatched(NamedTuple):
    """A dispatch, for the way back: rows, order of the pairs, place of each pair in it, and weights (N, K)."""

    rows: Rows
    order: Tensor
    places: Tensor
    weights_NK: Tensor


class ExpertParallel:
    """The hooks by which the tokens of all ranks travel to a rank's experts; see [Note: dispatch]. No communication.

    Args:
        experts: a module whose parameters are sharded already. It is called with tokens (N, H), the indices of their
            experts (N, K) and their weights (N, K); `num_experts` is the number of this rank's.
        group: the expert axis.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        self._group, self._num_local = group, experts.num_experts
        self._dispatched: _Dispatched | None = None  # between the two hooks
        change_inputs(experts, self._dispatch)
        # Before the hook that sums the partial results of sharded experts.
        experts.register_forward_hook(self._combine, prepend=True)

    @torch.compiler.disable
    def _dispatch(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """Replace the tokens by the rows for this rank's experts."""
        names = list(inputs)[:3]
        hidden_NH, index_NK, weights_NK = (inputs[name] for name in names)
        num_choices = index_NK.shape[1]
        if weights_NK.shape[1] != num_choices:  # of all experts, as Phi-MoE's in transformers 5.0
            weights_NK = weights_NK.gather(1, index_NK)
        expert_R = index_NK.reshape(-1)
        order = torch.argsort(expert_R, stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = expert_R.new_zeros(self._group.size() * self._num_local)
        counts.scatter_add_(0, expert_R, torch.ones_like(expert_R))
        rows = exchange_counts(counts.view(self._group.size(), -1), self._group)
        self._dispatched = _Dispatched(rows, order, places, weights_NK)

        tokens = order // num_choices

        def send(x: Tensor) -> Tensor:
            return exchange_rows(x[tokens], rows.sent, rows.received, self._group)

        def take_back(gradient: Tensor) -> Tensor:
            arrived = exchange_rows(gradient, rows.received, rows.sent, self._group)
            return arrived[places].unflatten(0, (-1, num_choices)).sum(1)

        rows_RH = paired(hidden_NH, send, take_back)
        local = torch.arange(self._num_local, device=order.device).repeat(self._group.size())
        expert_R = local.repeat_interleave(rows.counts_PE.view(-1), output_size=len(rows_RH))
        if not len(rows_RH):
            rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
            expert_R = expert_R.new_zeros(1)
        ones = weights_NK.new_ones(len(rows_RH), 1)
        inputs.update(zip(names, (rows_RH, expert_R[:, None], ones), strict=True))

    @torch.compiler.disable
    def _combine(self, module: nn.Module, args: Any, output_RH: Tensor) -> Tensor:
        """Return the weighted sums (N, H) of the experts' results."""
        assert self._dispatched is not None
        (rows, order, places, weights_NK), self._dispatched = self._dispatched, None

        def send_back(x: Tensor) -> Tensor:
            return exchange_rows(x[: sum(rows.received)], rows.received, rows.sent, self._group)[places]

        def take(gradient: Tensor) -> Tensor:
            arrived = exchange_rows(gradient[order], rows.sent, rows.received, self._group)
            return arrived if len(arrived) == len(output_RH) else torch.zeros_like(output_RH)

        pairs_NKH = paired(output_RH, send_back, take).unflatten(0, weights_NK.shape)
        return (pairs_NKH * weights_NK.unsqueeze(-1)).sum(1).to(output_RH.dtype)


# Functions by which routers choose experts, and the kinds of their results.
_CHOOSING: dict[Any, Any] = {
    torch.topk: torch.return_types.topk,
    Tensor.topk: torch.return_types.topk,
    torch.max: torch.return_types.max,
    Tensor.max: torch.return_types.max,
}


class Choices(TorchFunctionMode):
    """A context in which the choices of a forward are saved, or replayed in every later one; see the note above."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Any] = []
        self._replayed: Iterator[Any] | None = None

    def __enter__(self) -> "Choices":
        self._replayed = iter(self._saved) if self._saved else None
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave this context alone: hooks of the layer may have entered others, which stay. Private torch API."""
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; save or replay what it chose."""
        kwargs = kwargs or {}
        if func is exchange_counts:
            return self._choose(partial(func, *args, **kwargs))
        kind = _CHOOSING.get(func)
        if kind is None or (kind is torch.return_types.max and "dim" not in kwargs):
            return func(*args, **kwargs)  # also the larger of two tensors, or the largest entry
        # The same operations in both passes: autograd compares what they save.
        x, dim = args[0], kwargs.get("dim", args[2] if len(args) > 2 else -1)
        indices = self._choose(lambda: func(x.detach(), *args[1:], **kwargs).indices)
        if indices.ndim == x.ndim:
            return kind((x.gather(dim, indices), indices))
        return kind((x.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices))

    def _choose(self, choose: Callable[[], Any]) -> Any:
        if self._replayed is not None:
            return next(self._replayed)
        self._saved.append(choose())
        return self._saved[-1]


def replaying(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function that replays the choices of a forward in its recomputation.

    Args:
        checkpoint: calls a function in forward and again in backward.
    """

    def checkpoint_with_choices(function: Callable[..., Any], *args: Any) -> Any:
        choices = Choices()

        def compute(*args: Any) -> Any:
            with choices:
                return function(*args)

        return checkpoint(compute, *args)

    return checkpoint_with_choices
