"""Sequences sharded over the tensor axis: all-gathered at a region's entry, reduce-scattered at its end.

Between regions each rank has a shard of the sequence, inside them the full sequence with a shard of the features
(arXiv:2205.05198, section 4.2.2). Layers that regions cannot shard compute on full sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn.functional import linear, pad

from ...cluster.collectives import InFlight, begin_gather, begin_sum_of_rows, once_differentiable, paired
from ...pipeline.weight_gradients import WeightGradientQueue
from .deferred_linear import Crossing, WeightProduct, gradient_or_deferred
from .parallel_module import change_inputs, name_of_first_tensor
from .sequence_axis import SequenceAxis, gather_sequence, shard_sequence

# B batch, S true sequence, s a rank's shard with padding, H hidden, I input features, O output features,
# N rows of all samples, T size of the group


@dataclass(frozen=True)
class RegionSequence:
    """Collectives between sharded and full sequences in a model's regions.

    Args:
        axis: the axis over which the sequences are sharded: the tensor axis, one stretch per rank.
        regathers: save the local shard for backward instead of the gathered sequence, and all-gather it again.
        overlap: in backward, all-gather while gradients are computed.
    """

    axis: SequenceAxis
    regathers: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.axis.order.is_zigzag:
            raise AssertionError("regions gather only sequences whose shards are contiguous")

    def begin_gather(self, shard_BsH: Tensor, length: int) -> InFlight[Tensor]:
        """Begin to gather a sequence of this length (B, S, H). One all-gather."""
        return begin_gather(shard_BsH, self.axis.group).finished_by(partial(_join_shards, length=length))

    def begin_reduce_scatter(self, partial_BSH: Tensor) -> InFlight[Tensor]:
        """Begin to sum over the ranks and scatter, to this rank's shard (B, s, H). One reduce-scatter."""
        return begin_sum_of_rows(self.shards(partial_BSH), self.axis.group)

    def shards(self, full_BSH: Tensor) -> Tensor:
        """Return the shards of all ranks (T, B, s, H) of a full sequence; padding is zeros."""
        order, length = self.axis.order, full_BSH.shape[1]
        padded = pad(full_BSH, (0, 0, 0, order.padded(length) - length))
        return padded.unflatten(1, (order.size, -1)).transpose(0, 1)

    def crossing(self, shard_BsH: Tensor) -> Crossing:
        """Return the collectives at a region's entry: all-gather to (B, S, H), and reduce-scatter of its gradient.

        None of them is begun here.

        Args:
            shard_BsH: this rank's shard; or (B·s, H), which becomes (B·S, H).
        """
        if shard_BsH.ndim == 2:  # the tokens of all samples in one dimension
            by_sample, length = (-1, self.axis.shard_length), self.axis.length
            by_sample_crossing = self.crossing(shard_BsH.unflatten(0, by_sample))
            return Crossing(
                lambda shard: by_sample_crossing.forward(shard.unflatten(0, by_sample)).flatten(0, 1),
                lambda gradient: self.begin_reduce_scatter(gradient.unflatten(0, (-1, length))).finished_by(
                    _flatten_samples
                ),
            )
        length = self.length_of(shard_BsH)
        return Crossing(lambda shard: self.begin_gather(shard, length).wait(), self.begin_reduce_scatter)

    def length_of(self, shard_BsH: Tensor) -> int:
        """Return the full length of the sequence of a shard.

        Raises:
            ValueError: it is not a shard of the current sequence.
        """
        if shard_BsH.ndim != 3 or shard_BsH.shape[1] != self.axis.shard_length:
            raise ValueError(
                f"a layer received an input of shape {tuple(shard_BsH.shape)}, but a rank's shard of a "
                f"sequence of {self.axis.length} is (batch, {self.axis.shard_length}, width): train this "
                "model without enable_sequence_parallelism"
            )
        return self.axis.length


def _join_shards(shards_TBsH: Tensor, *, length: int) -> Tensor:
    """Return the full sequence (B, S, H) of this length from the shards of all ranks."""
    return shards_TBsH.transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _flatten_samples(x_BSH: Tensor) -> Tensor:
    """Return the positions of all samples as one dimension, (B·S, H)."""
    return x_BSH.flatten(0, 1)


def leave(partial_BSH: Tensor, sequence: RegionSequence) -> Tensor:
    """Reduce-scatter a region's output (B, S, H) to (B, s, H), or (B·S, H) to (B·s, H); backward all-gathers."""
    if partial_BSH.ndim == 2:
        return leave(partial_BSH.unflatten(0, (-1, sequence.axis.length)), sequence).flatten(0, 1)
    length = partial_BSH.shape[1]
    return paired(
        partial_BSH,
        lambda partial: sequence.begin_reduce_scatter(partial).wait(),
        lambda gradient: sequence.begin_gather(gradient, length).wait(),
    )


def row_product(
    x_BSI: Tensor,
    weight: Parameter,
    sequence: RegionSequence,
    *,
    is_transposed: bool,
    store: WeightGradientQueue | None,
) -> Tensor:
    """Compute the row-parallel product that ends a region, and reduce-scatter it over the sequence.

    One reduce-scatter; backward one all-gather, overlapped with the product of the local shard.

    Args:
        x_BSI: this rank's input features; or (B·S, I).
        weight: this rank's columns of the weight.
        sequence: sharding of the result.
        is_transposed: the weight is (I, O).
        store: queue of the schedule, which may defer the weight's gradient; None for none.

    Returns:
        (B, s, O), or (B·s, O).
    """
    if x_BSI.ndim == 2:
        by_sample = x_BSI.unflatten(0, (-1, sequence.axis.length))
        return row_product(by_sample, weight, sequence, is_transposed=is_transposed, store=store).flatten(
            0, 1
        )
    compute_or_defer = partial(gradient_or_deferred, weight, store, None)
    out: Tensor = _RowProduct.apply(x_BSI, weight, sequence, is_transposed, compute_or_defer)
    return out


class _RowProduct(Function):
    """The product of `row_product`: forward reduce-scatters its result over the sequence.

    Backward all-gathers the gradient. Meanwhile it multiplies the local shard of the gradient, then the other shards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BSI: Tensor,
        weight: Tensor,
        sequence: RegionSequence,
        is_transposed: bool,
        compute_or_defer: Callable[[WeightProduct], Tensor | None],
    ) -> Tensor:
        """Return this rank's shard (B, s, O) of the sum over ranks.

        Args:
            x_BSI, weight, sequence, is_transposed: see `row_product`.
            compute_or_defer: takes the weight's gradient; returns None if it is deferred or added already.
        """
        ctx.save_for_backward(x_BSI, weight)
        ctx.sequence, ctx.is_transposed, ctx.compute_or_defer = sequence, is_transposed, compute_or_defer
        partial_BSO = linear(x_BSI, weight.T if is_transposed else weight)
        return sequence.begin_reduce_scatter(partial_BSO).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BsO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Compute the input's gradient at this rank's positions while the gradient of the others is gathered."""
        x_BSI, weight = ctx.saved_tensors
        length, shard_length = x_BSI.shape[1], gradient_BsO.shape[1]
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        in_flight = ctx.sequence.begin_gather(gradient_BsO, length)
        start = min(ctx.sequence.axis.rank * shard_length, length)
        stop = min(start + shard_length, length)  # without padding
        weight_IO = weight if ctx.is_transposed else weight.T
        of_input, of_weight = None, None
        if needs_input:
            of_input = torch.empty_like(x_BSI)
            of_input[:, start:stop] = linear(gradient_BsO[:, : stop - start], weight_IO)
        gradient_BSO = in_flight.wait()
        if of_input is not None:
            for other_positions in (slice(0, start), slice(stop, length)):
                of_input[:, other_positions] = linear(gradient_BSO[:, other_positions], weight_IO)
        if needs_weight:
            x_NI, gradient_NO = x_BSI.flatten(0, 1), gradient_BSO.flatten(0, 1)
            of_weight = ctx.compute_or_defer(WeightProduct(x_NI, gradient_NO, ctx.is_transposed))
        return of_input, of_weight, None, None, None


class GatheredSequence:
    """Hooks by which a module gets the full sequence on every rank, and its output is sharded again.

    For modules that regions cannot shard: experts, which take tokens without positions, and modules that also use their
    full input elsewhere. Forward gathers at the entry, backward at the end: 2·(T−1)/T·B·S·H more than regions.
    """

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, sequence: RegionSequence
    ) -> nn.Module:
        """Add hooks that gather the module's first tensor and shard its output, or the first entry of a tuple.

        Args:
            module: it is called with shards (B, s, H); its forward gets (B, S, H).
            process_group: the tensor axis.
            sequence: sharding of the sequence.
        """
        axis = sequence.axis

        def gather(module: nn.Module, inputs: dict[str, Any]) -> None:
            shard = inputs[name := name_of_first_tensor(inputs)]
            inputs[name] = gather_sequence(shard, axis, sequence.length_of(shard), is_on_sequence_axis=False)

        def scatter(module: nn.Module, args: tuple, output: Any) -> Any:
            if isinstance(output, tuple):
                return (shard_sequence(output[0], axis, is_on_sequence_axis=False), *output[1:])
            return shard_sequence(output, axis, is_on_sequence_axis=False)

        change_inputs(module, gather)
        module.register_forward_hook(scatter)
        return module
