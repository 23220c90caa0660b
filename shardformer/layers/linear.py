"""Linear layers sharded over the tensor axis by columns or rows, including fused ones and transformers' Conv1D."""

# B batch, S sequence, I input features, O output features, T size of the group, D width of a head
# Q widths of a rank's query heads, K key-value heads in all, C ranks that share one: T = K × C

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ...cluster.collectives import (
    begin_all_reduce,
    gather_from,
    gather_to,
    paired,
    reduce_from,
    scatter_to,
    unchanged,
)
from ...cluster.forward_random import SplitRandom
from ...cluster.placement import PartialGrad, Replicated, place
from ...cluster.transformers_api import Conv1D
from ...pipeline.weight_gradients import WeightGradientQueue
from .deferred_linear import (
    Crossing,
    LaterProduct,
    Regather,
    enter_overlapped,
    is_trained,
    is_transformed,
    linear,
)
from .parallel_module import ParallelModule, require_native, shard_of
from .split_gather import RegionSequence, leave, row_product


class ProductLayer(ParallelModule):
    """A parallel layer that multiplies by its weight, whose gradient may be deferred.

    Attributes:
        later_product, input_shard: arguments of the next call, set by a region's `enter`; see `linear`. `input_shard`
            is this rank's shard of the input, which backward gathers again, and the gathered input. Set in
            `vars(layer)`, since nn.Module's `__setattr__` takes microseconds.
    """

    group: dist.ProcessGroup
    weight: Parameter
    bias: Parameter | None
    output_dim = 0  # nn.Linear holds (O, I)
    weight_gradients: WeightGradientQueue | None = None  # queue of the schedule
    later_product: LaterProduct | None = None
    input_shard: tuple[Tensor, Regather] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without the arguments of the next call."""
        return {
            name: value for name, value in vars(self).items() if name not in ("later_product", "input_shard")
        }

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the weight, and remove the attributes that the region's `enter` set for this call alone."""
        attributes = {} if torch.compiler.is_compiling() else vars(self)
        later_product = attributes.pop("later_product", None)
        input_shard = attributes.pop("input_shard", None)
        if input_shard is not None and not input_shard[1].is_of(x):  # the shard of another tensor than x
            input_shard = None
        is_transposed = self.output_dim == 1
        return linear(x, self.weight, bias, is_transposed, self.weight_gradients, later_product, input_shard)


def enter(
    xs: Sequence[Tensor],
    group: dist.ProcessGroup,
    layers: Sequence[ProductLayer],
    sequence: RegionSequence | None = None,
) -> list[Tensor]:
    """Enter a region with inputs: identity in forward, an all-reduce in backward.

    While the all-reduce is in flight, backward computes the weight gradients of the layers (arXiv:1909.08053,
    section 3, has only the all-reduce). For this, `later_product` and `input_shard` of the layers are set for their
    next call.

    Args:
        xs: replicated inputs.
        group: the tensor axis.
        layers: the layers that multiply with the inputs.
        sequence: set if the first input is sequence-sharded; it is all-gathered in forward, and its gradient is
            reduce-scattered in backward.

    Returns:
        The inputs inside the region, in order.
    """
    if group.size() == 1:
        return list(xs)
    crossings = [Crossing(unchanged, partial(begin_all_reduce, group=group))] * len(xs)
    if sequence is not None:
        crossings[0] = sequence.crossing(xs[0])
    if torch.compiler.is_compiling():  # the compiler orders products and sums itself
        return [
            paired(x, crossing.forward, partial(_communicate_gradient, crossing))
            for x, crossing in zip(xs, crossings, strict=True)
        ]
    trained: dict[Tensor, ProductLayer] = {}  # by weight: a tied one has one later product
    if torch.is_grad_enabled() and not is_transformed():
        for layer in layers:
            weight = layer._parameters.get("weight")  # None if the weight is computed (weight_norm)
            if weight is not None and is_trained(weight):
                trained.setdefault(weight, layer)
    entered, later_product = enter_overlapped(xs, crossings, tuple(trained))
    if later_product is not None:  # without a gradient of an input there is nothing to wait for
        for layer in trained.values():
            vars(layer)["later_product"] = later_product
    if sequence is not None and sequence.regathers:
        shard, axis = xs[0].detach(), sequence.axis
        by_sample = shard if shard.ndim > 2 else shard.unflatten(0, (-1, axis.shard_length))
        begin = partial(sequence.begin_gather, length=axis.length)
        input_shard = by_sample, Regather(entered[0], begin, overlap=sequence.overlap)
        for layer in layers:
            vars(layer)["input_shard"] = input_shard
    return entered


def _communicate_gradient(crossing: Crossing, gradient: Tensor) -> Tensor:
    """Communicate a gradient at the entry of a region, and wait for it."""
    return crossing.begin_backward(gradient).wait()


class _SplitLinear(ProductLayer):
    """Base of the sharded linear layers; takes over the native module's parameters."""

    native_class: type[nn.Module] = nn.Linear

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
    ) -> None:
        require_native(native, native_class or self.native_class)
        super().__init__()
        self.group = process_group
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        self.bias: Parameter | None = native.bias  # type: ignore[assignment]
        self.train(native.training)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)}, bias={self.bias is not None}, ranks={self.group.size()}"


class Linear1D_Col(_SplitLinear):
    """A linear layer sharded by output features: replicated inputs, local outputs.

    Args:
        native: the layer to shard.
        process_group: the tensor axis, of size T.
        native_class: the class of `native`, if it is a subclass that computes the same as the plain class.
        gather_output: return all outputs on all ranks (forward all-gather, backward slice).
        reduce_input_gradient: sum the input's gradient over the group in backward. False inside a region, which sums
            once for all its layers.
        cut: sharding of the output features, see `shard_of`: `split_sizes`, `padded_sizes`, `replicas`, `stretches`.
    """

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
        gather_output: bool = False,
        reduce_input_gradient: bool = True,
        **cut: Any,
    ) -> None:
        super().__init__(native, process_group, native_class=native_class)
        shard = shard_of(self.weight, self.output_dim, process_group, **cut)
        if gather_output and (shard.replicas > 1 or len(shard.blocks) > 1):
            raise ValueError(
                "gather_output=True is for layers whose output is a single block without replicas: gather "
                "the output of a later layer instead"
            )
        self.gather_output = gather_output
        self.reduce_input_gradient = reduce_input_gradient
        place(self.weight, shard, process_group.rank())
        if self.bias is not None:
            place(self.bias, replace(shard, dim=0), process_group.rank())

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I) in, equal on all ranks; (B, S, O/T) out, or (B, S, O) with `gather_output`."""
        if self.reduce_input_gradient:
            (x_BSI,) = enter([x_BSI], self.group, [self])
        out_BSO = self._product(x_BSI, self.bias)
        return gather_from(out_BSO, self.group, -1) if self.gather_output else out_BSO


class SharedKeyValueLinear1D_Col(Linear1D_Col):
    """A fused projection with full query heads on each rank, and key-value heads sharded over several ranks.

    The ranks that share a key-value head all-gather its key and value. So every weight, like those of the query heads,
    is on one rank only, and no gradient has to be summed.

    Args:
        native: the projection; the outputs of each stretch are concatenated query heads, keys and values.
        process_group: the tensor axis, of size T.
        num_key_value_heads: K, a divisor of T; padded heads included.
        kwargs: of `Linear1D_Col`.
    """

    def __init__(
        self, native: nn.Module, process_group: dist.ProcessGroup, *, num_key_value_heads: int, **kwargs: Any
    ) -> None:
        super().__init__(native, process_group, **kwargs)
        self.num_key_value_heads = num_key_value_heads
        sizes = kwargs.get("padded_sizes") or kwargs["split_sizes"]
        self.shard_width = sizes[-1] * kwargs.get("stretches", 1) // process_group.size()

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I) in, equal on all ranks; (B, S, Q + 2D) out. Forward all-gather, backward reduce-scatter.

        Each rank computes its query heads and a slice of one key and value head; the slices are gathered.
        """
        out = super().forward(x_BSI)
        query_BSQ, key_value_slices = out.tensor_split([-2 * self.shard_width], -1)
        ranks_per_head = self.group.size() // self.num_key_value_heads
        # (B, S, K, C, 2, width of a slice); 2: key and value
        gathered_KC2 = gather_to(key_value_slices, self.group, -1).unflatten(
            -1, (self.num_key_value_heads, ranks_per_head, 2, self.shard_width)
        )
        local_C2 = gathered_KC2.select(-4, self.group.rank() // ranks_per_head)
        return torch.cat([query_BSQ, local_C2.transpose(-3, -2).flatten(-3)], -1)


class FusedLinear1D_Col(Linear1D_Col):
    """A column-sharded linear layer whose outputs are several concatenated projections.

    Args:
        split_sizes: the length of each projection.
    """

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        split_sizes: Sequence[int],
        **kwargs: Any,
    ) -> None:
        super().__init__(native, process_group, split_sizes=split_sizes, **kwargs)


class Linear1D_Row(_SplitLinear):
    """A linear layer sharded by input features: local inputs, replicated outputs (forward all-reduce).

    Args:
        native: the layer to shard.
        process_group: the tensor axis, of size T.
        native_class: the class of `native`, if it is a subclass that computes the same as the plain class.
        split_random: the random state that the region before switched to; switched back here.
        split_input: inputs are replicated, and each rank takes its slice (backward all-gather).
        sequence: sequence sharding of the outputs: each rank returns its shard (forward reduce-scatter). The bias is
            added to the shard, so its gradient is partial.
        cut: sharding of the input features, see `shard_of`. Inputs at padded features are dropped, so the zero weights
            there get no gradient.
    """

    _is_unpadded: Tensor | None  # of local input features: 1, or 0 at padded ones; None without padding

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
        split_random: SplitRandom | None = None,
        split_input: bool = False,
        sequence: RegionSequence | None = None,
        **cut: Any,
    ) -> None:
        super().__init__(native, process_group, native_class=native_class)
        self.split_input = split_input
        self.sequence = sequence
        self.split_random = split_random
        dim = 1 - self.output_dim
        shard = shard_of(self.weight, dim, process_group, **cut)
        is_unpadded = replace(shard, dim=0).local(torch.ones(sum(shard.blocks)), process_group.rank())
        self.register_buffer(
            "_is_unpadded",
            None if bool(is_unpadded.all()) else is_unpadded.to(self.weight.device),
            persistent=False,
        )
        place(self.weight, shard, process_group.rank())
        if self.bias is not None:
            kind = Replicated if sequence is None else PartialGrad
            place(self.bias, kind(size=process_group.size()), process_group.rank())

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I/T) in, or (B, S, I) with `split_input`; (B, S, O) out, equal on all ranks, or a part of S."""
        if self.split_input:
            x_BSI = scatter_to(x_BSI, self.group, -1)
        if self._is_unpadded is not None:
            x_BSI = x_BSI * self._is_unpadded.to(x_BSI.dtype)
        if self.split_random is not None and self.training:
            self.split_random.leave()
        out_BSO = self._summed_product(x_BSI)
        return out_BSO if self.bias is None else out_BSO + self.bias

    def _summed_product(self, x_BSI: Tensor) -> Tensor:
        """Return the product summed over the ranks, or this rank's slice of it along the sequence."""
        sequence = self.sequence
        if sequence is None:
            return reduce_from(self._product(x_BSI, None), self.group)
        is_plain = self.weight.is_leaf and not torch.is_autocast_enabled(x_BSI.device.type)
        if sequence.overlap and is_plain and not torch.compiler.is_compiling():
            is_transposed, store = self.output_dim == 1, self.weight_gradients
            return row_product(x_BSI, self.weight, sequence, is_transposed=is_transposed, store=store)
        return leave(self._product(x_BSI, None), sequence)


class GPT2FusedLinearConv1D_Col(Linear1D_Col):
    """`Linear1D_Col` for transformers' Conv1D, which holds (I, O); `split_sizes` where it is fused."""

    native_class = Conv1D
    output_dim = 1


class GPT2FusedLinearConv1D_Row(Linear1D_Row):
    """`Linear1D_Row` for transformers' Conv1D, which holds (I, O)."""

    native_class = Conv1D
    output_dim = 1
