"""Expert parallelism: every rank has some of the experts, and tokens travel to their experts and back.

[Note: dispatch] The module of experts stays as it is, and so does its forward. A hook before it sorts pairs of a token
and an expert by expert and sends them to the ranks of the experts; the native forward computes with the rank's experts
on the rows that arrive; a hook after it sends the results back, where they are weighted and added (arXiv:2006.16668,
section 2.2, without a capacity: no token is dropped). A forward has three all-to-alls, one of them of counts, and
reads the numbers of rows once on the host; a backward has two and reads nothing.

Every rank takes part in each exchange, however few tokens or rows it has. Without rows, the experts compute one of
zeros whose result nobody uses, so that all ranks have the same graph. Experts that are modules compute only if they get
a token. So their parameters pass through the result (`_PassParameters`): the hooks of all of them run in every
backward, between the same two exchanges on every rank, and averages that begin in backward (ZeRO-2) have one order.

[Note: replayed choices] A recomputed forward must send the same rows. Rounding may differ in it, so that a router would
choose other experts, and the gradients would be wrong without an error. `Choices` saves what `topk` or `max` chose in
forward, and the numbers of rows; recomputation takes them from there, without another exchange of counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
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
        max_received: number of rows received for the expert with the most.
    """

    sent: list[int]
    received: list[int]
    counts_PE: Tensor
    max_received: int


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup) -> Rows:
    """Exchange the numbers of rows. All-to-all of P·E integers; waits for the device.

    `Choices` intercepts the call, as if it were a function of torch, and replays its result in a recomputation.

    Args:
        counts_PE: rows of this rank for each expert E of each rank P.
        group: the expert axis.
    """
    if has_torch_function_unary(counts_PE):
        rows: Rows = handle_torch_function(exchange_counts, (counts_PE,), counts_PE, group)
        return rows
    ones = [1] * group.size()
    arrived_PE = exchange_rows(counts_PE, ones, ones, group)
    sizes = torch.cat([counts_PE.sum(1), arrived_PE.sum(1), arrived_PE.sum(0).max().unsqueeze(0)]).tolist()
    return Rows(sizes[: group.size()], sizes[group.size() : -1], arrived_PE, sizes[-1])


class ExpertCall(NamedTuple):
    """A call of experts: tokens (N, H), the indices of their experts (N, K), and weights (N, K) of the results.

    Pairs whose index is the number of experts, or above, stay where they are, and add nothing.
    """

    hidden_NH: Tensor
    index_NK: Tensor
    weights_NK: Tensor


def _common_call(inputs: dict[str, Any], count: int) -> ExpertCall:
    """Return the call of tokens, indices and weights; weights may be of all experts (transformers 5.0's Phi-MoE)."""
    hidden_NH, index_NK, weights_NK = list(inputs.values())[:3]
    if weights_NK.shape[-1] != index_NK.shape[-1]:
        weights_NK = weights_NK.gather(-1, index_NK)
    return ExpertCall(hidden_NH, index_NK, weights_NK)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Calls of a class of experts, in terms of `ExpertCall`.

    Args:
        counts: attributes with numbers of experts: first of those with parameters, then of all that have rows in a
            parameter, if these are more.
        has_module_per_expert: each expert is a module of its own, on one rank. The forward of the module of experts
            then gets indices into the experts of all ranks, not of this rank alone.
        is_identity_above: tokens of experts without parameters are their results.
        call: returns the call that inputs (by name, in the order of the signature) stand for, of that many experts.
        inputs: returns the inputs by which a module's forward computes a call of one expert for each row, and the
            index of each row in its output.
    """

    counts: tuple[str, ...] = ("num_experts",)
    has_module_per_expert: bool = False
    is_identity_above: bool = False
    call: Callable[[dict[str, Any], int], ExpertCall] = _common_call
    inputs: Callable[[Any, ExpertCall, Rows], tuple[tuple[Tensor, ...], Tensor | None]] = lambda _, call, __: (
        call,
        None,
    )


COMMON = Interface()


class _Dispatched(NamedTuple):
    """State of a dispatch that `_combine` needs.

    Args:
        rows: of the exchange.
        order: indices of the pairs of a token and an expert, sorted by expert.
        positions: the position of each pair in this order.
        weights_NK: of the pairs.
        in_output: the index of each row in the output of the experts' forward; None if they are in order.
        shape: of the tokens in the call.
        unused_RH: the row of zeros that the experts compute if no rows arrive; None if some arrive.
        identity_NH: results of pairs whose expert has no parameters and returns its input; None without such experts.
    """

    rows: Rows
    order: Tensor
    positions: Tensor
    weights_NK: Tensor
    in_output: Tensor | None
    shape: torch.Size
    unused_RH: Tensor | None
    identity_NH: Tensor | None


class ExpertParallel:
    """The hooks by which the tokens of all ranks travel to a rank's experts; see [Note: dispatch]. No communication.

    Args:
        experts: a module whose parameters are sharded already, and whose numbers of experts are those of this rank.
        group: the expert axis.
        interface: how the module is called.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup, interface: Interface = COMMON) -> None:
        self._group, self._interface = group, interface
        count: int = getattr(experts, interface.counts[0])
        self._num_local = count // group.size() if interface.has_module_per_expert else count
        self._dispatched: _Dispatched | None = None  # between the two hooks
        change_inputs(experts, self._dispatch)
        # Before the hook that sums the partial results of sharded experts.
        experts.register_forward_hook(self._combine, prepend=True)

    @torch.compiler.disable
    def _dispatch(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """Forward pre-hook: send each token to the ranks of its experts, and replace the inputs by the rows received.

        The state for `_combine` is saved in `_dispatched`. P is the number of pairs N·K, R that of received rows.
        """
        num_experts = self._group.size() * self._num_local
        call = self._interface.call(inputs, num_experts)
        shape, num_choices = call.hidden_NH.shape, call.index_NK.shape[-1]
        hidden_NH, weights_NK = call.hidden_NH.flatten(0, -2), call.weights_NK.flatten(0, -2)
        expert_P = call.index_NK.reshape(-1)
        order = torch.argsort(expert_P, stable=True)
        positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = expert_P.new_zeros(num_experts + 1)
        counts.scatter_add_(0, expert_P.clamp(max=num_experts), torch.ones_like(expert_P))
        rows = exchange_counts(counts[:-1].view(self._group.size(), -1), self._group)
        identity_NH = None
        if self._interface.is_identity_above:
            is_identity_NK = (expert_P >= num_experts).view_as(weights_NK)
            identity_NH = hidden_NH * (weights_NK * is_identity_NK).sum(1, keepdim=True)

        tokens = order[: sum(rows.sent)] // num_choices

        def send(x: Tensor) -> Tensor:
            """Forward: send a row for each pair to the rank of its expert."""
            return exchange_rows(x[tokens], rows.sent, rows.received, self._group)

        def return_gradients(gradient: Tensor) -> Tensor:
            """Backward: send gradients of rows back, and add those of each token."""
            arrived = exchange_rows(gradient, rows.received, rows.sent, self._group)
            return _pad_rows(arrived, len(positions))[positions].unflatten(0, (-1, num_choices)).sum(1)

        rows_RH = paired(hidden_NH, send, return_gradients)
        local = torch.arange(self._num_local, device=order.device).repeat(self._group.size())
        expert_R = local.repeat_interleave(rows.counts_PE.view(-1), output_size=len(rows_RH))
        unused_RH = None
        if not len(rows_RH):
            rows_RH = unused_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
            expert_R = expert_R.new_zeros(1)
        if self._interface.has_module_per_expert:
            expert_R = expert_R + self._group.rank() * self._num_local
        ones = weights_NK.new_ones(len(rows_RH), 1)
        computed, in_output = self._interface.inputs(
            module, ExpertCall(rows_RH, expert_R[:, None], ones), rows
        )
        inputs.update(zip(list(inputs), computed, strict=False))
        self._dispatched = _Dispatched(
            rows=rows,
            order=order,
            positions=positions,
            weights_NK=weights_NK,
            in_output=in_output,
            shape=shape,
            unused_RH=unused_RH,
            identity_NH=identity_NH,
        )

    @torch.compiler.disable
    def _combine(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Forward hook: return each token's weighted sum of its experts' results, in the shape of the tokens."""
        assert self._dispatched is not None
        rows, order, positions, weights_NK, in_output, shape, unused_RH, identity_NH = self._dispatched
        self._dispatched = None
        output_RH = output.flatten(0, -2)
        # Experts that are modules leave an unused row out, so it joins the graph here: all ranks need the same graph.
        if unused_RH is not None and self._interface.has_module_per_expert:
            output_RH = output_RH.detach() + 0 * unused_RH
        if self._interface.has_module_per_expert and torch.is_grad_enabled():
            output_RH = _PassParameters.apply(
                output_RH, *(parameter for parameter in module.parameters() if parameter.requires_grad)
            )
        if in_output is not None:
            output_RH = output_RH[in_output]

        num_rows = len(output_RH)  # not the tensor, which would be kept for backward

        def return_results(x: Tensor) -> Tensor:
            """Forward: send results back to the ranks of their tokens, in the order of the pairs."""
            arrived = exchange_rows(x[: sum(rows.received)], rows.received, rows.sent, self._group)
            return _pad_rows(arrived, len(positions))[positions]

        def receive_gradients(gradient: Tensor) -> Tensor:
            """Backward: send the gradients of results to the ranks of their experts."""
            sent = gradient[order[: sum(rows.sent)]]
            arrived = exchange_rows(sent, rows.sent, rows.received, self._group)
            return arrived if len(arrived) == num_rows else arrived.new_zeros(num_rows, arrived.shape[1])

        pairs_NKH = paired(output_RH, return_results, receive_gradients).unflatten(0, weights_NK.shape)
        sums_NH = (pairs_NKH * weights_NK.unsqueeze(-1)).sum(1)
        if identity_NH is not None:
            sums_NH = sums_NH + identity_NH
        return sums_NH.to(output_RH.dtype).unflatten(0, shape[:-1])


class _PassParameters(Function):
    """Identity of a tensor, with parameters as further inputs: they get no gradient, but their hooks run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, *(None,) * ctx.num_parameters)


def _pad_rows(x: Tensor, length: int) -> Tensor:
    """Append rows of zeros, so that there are `length` rows."""
    return x if len(x) == length else torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])


# Functions by which routers choose experts: type of the result, position of the argument `dim`, and its default.
_TOPK, _MAX = (torch.return_types.topk, 2, -1), (torch.return_types.max, 1, None)
_CHOOSING: dict[Any, tuple[Any, int, int | None]] = {
    torch.topk: _TOPK,
    Tensor.topk: _TOPK,
    torch.max: _MAX,
    Tensor.max: _MAX,
}


class Choices(TorchFunctionMode):
    """A context that saves the choices of a forward when first entered, and later replays them.

    See [Note: replayed choices].
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Any] = []  # results of calls, in order: indices or `Rows`
        self._replayed: Iterator[Any] | None = None  # of `_saved`; None while they are saved

    def __enter__(self) -> "Choices":
        self._replayed = iter(self._saved) if self._saved else None
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave this context only: hooks of the layer may have entered others since, which stay. Private torch API."""
        entered_later = []
        while (mode := _pop_mode()) is not self:
            entered_later.append(mode)
        for mode in reversed(entered_later):
            _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; save or replay the result of `exchange_counts`, and the indices of `_CHOOSING`."""
        kwargs = kwargs or {}
        if func is exchange_counts:
            return self._save_or_replay(partial(func, *args, **kwargs))
        if func not in _CHOOSING:
            return func(*args, **kwargs)
        result_type, position, default = _CHOOSING[func]
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if not isinstance(dim, int):  # `max` of two tensors, or of all entries, has no indices
            return func(*args, **kwargs)
        # Forward gathers the values, too, as recomputation does: autograd compares the operations of both.
        x = args[0]
        indices = self._save_or_replay(lambda: func(x.detach(), *args[1:], **kwargs).indices)
        if indices.ndim == x.ndim:
            return result_type((x.gather(dim, indices), indices))
        return result_type((x.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices))

    def _save_or_replay(self, choose: Callable[[], Any]) -> Any:
        """Return the next saved choice if there are any; otherwise call `choose` and save its result."""
        if self._replayed is not None:
            return next(self._replayed)
        self._saved.append(choose())
        return self._saved[-1]


def replay_choices(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function that replays the choices of a forward in its recomputation.

    Args:
        checkpoint: calls a function in forward and again in backward.
    """

    def checkpoint_with_choices(function: Callable[..., Any], *args: Any) -> Any:
        choices = Choices()  # of this call: entered in its forward, and again in its recomputation

        def compute(*args: Any) -> Any:
            with choices:
                return function(*args)

        return checkpoint(compute, *args)

    return checkpoint_with_choices
