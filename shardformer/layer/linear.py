"""Linear layers split over the tensor axis, by columns and by rows, also fused ones and transformers' Conv1D."""

# B batch, S sequence, I input features, O output features, T size of the group

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from ...cluster.collectives import gather_from, reduce_from, scatter_to
from ...cluster.placement import Shard, Shared, place
from ...cluster.random import SplitRandom
from ...pipeline.linear import Keep
from ..sequence.regions import RegionSequence, leave
from ..sequence.ring_products import row_product
from .entry import ProductLayer, enter
from .parallel_module import require_native


class _SplitLinear(ProductLayer):
    """What the linear layers share: the native module's parameters."""

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
    """A linear layer split by output features: whole inputs in, this rank's outputs out.

    Args:
        native: the layer to split.
        process_group: the tensor axis, of size T.
        native_class: the class of `native`, where it is one of its own that computes what the plain one does.
        split_sizes: lengths of the fused blocks among the output features, each split on its own; None is one.
        padded_sizes: their lengths once padded with zeros, see `Shard`; None pads none.
        copies: how many neighbouring ranks hold the same outputs (key-value heads fewer than ranks).
        stretches: how many equal stretches the outputs have, see `Shard`.
        gather_output: return all outputs on all ranks (forward all-gather, backward slice).
        reduce_input_gradient: sum the input's gradient over the group in backward. False inside a region,
            which does it once for all its layers.
    """

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
        split_sizes: Sequence[int] | None = None,
        padded_sizes: Sequence[int] | None = None,
        copies: int = 1,
        stretches: int = 1,
        gather_output: bool = False,
        reduce_input_gradient: bool = True,
    ) -> None:
        super().__init__(native, process_group, native_class=native_class)
        if gather_output and (copies > 1 or split_sizes is not None):
            raise ValueError(
                "gather_output is for outputs of one block without copies: gather what follows instead"
            )
        self.gather_output = gather_output
        self.reduce_input_gradient = reduce_input_gradient
        size, rank = process_group.size(), process_group.rank()
        shard = Shard(
            size=size,
            dim=self.output_dim,
            blocks=_sizes(self.weight, self.output_dim, split_sizes),
            padded=None if padded_sizes is None else tuple(padded_sizes),
            copies=copies,
            stretches=stretches,
        )
        place(self.weight, shard, rank)
        if self.bias is not None:
            place(self.bias, replace(shard, dim=0), rank)

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "Linear1D_Col | GPT2FusedLinearConv1D_Col":
        """See the class for the arguments; takes an nn.Linear."""
        return Linear1D_Col(module, process_group, **kwargs)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I) in, equal on all ranks; (B, S, O/T) out, or (B, S, O) with `gather_output`."""
        if self.reduce_input_gradient:
            (x_BSI,) = enter([x_BSI], self.group, [self])
        out_BSO = self._product(x_BSI, self.bias)
        return gather_from(out_BSO, self.group, -1) if self.gather_output else out_BSO


class FusedLinear1D_Col(Linear1D_Col):
    """A column-split linear layer whose outputs are several projections side by side (`split_sizes` says which)."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "FusedLinear1D_Col":
        """See `Linear1D_Col` for the arguments; `split_sizes` is required."""
        if "split_sizes" not in kwargs:
            raise ValueError("a fused projection needs split_sizes, the length of each projection")
        return FusedLinear1D_Col(module, process_group, **kwargs)


class Linear1D_Row(_SplitLinear):
    """A linear layer split by input features: this rank's inputs in, whole outputs out (forward all-reduce).

    Args:
        native: the layer to split.
        process_group: the tensor axis, of size T.
        native_class: the class of `native`, where it is one of its own that computes what the plain one does.
        split_random: the random state that the region before switched to; switched back here.
        split_input: inputs arrive whole, and each rank takes its own (backward all-gather).
        split_sizes, padded_sizes, stretches: of the input features, see `Linear1D_Col`. What comes in as a feature that
            was added is dropped, so the zeros that it is multiplied with get no gradient.
        sequence: how whole outputs are spread: this rank's part comes out (forward reduce-scatter). The bias is added
            to that, so its gradient is a part of a sum.
    """

    _is_real: Tensor | None

    def __init__(
        self,
        native: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        native_class: type[nn.Module] | None = None,
        split_random: SplitRandom | None = None,
        split_input: bool = False,
        split_sizes: Sequence[int] | None = None,
        padded_sizes: Sequence[int] | None = None,
        stretches: int = 1,
        sequence: RegionSequence | None = None,
    ) -> None:
        super().__init__(native, process_group, native_class=native_class)
        self.split_input = split_input
        self.sequence = sequence
        self._split_random = split_random
        dim = 1 - self.output_dim
        shard = Shard(
            size=process_group.size(),
            dim=dim,
            blocks=_sizes(self.weight, dim, split_sizes),
            padded=None if padded_sizes is None else tuple(padded_sizes),
            stretches=stretches,
        )
        is_real = replace(shard, dim=0).local(torch.ones(self.weight.shape[dim]), process_group.rank())
        self.register_buffer(
            "_is_real", None if bool(is_real.all()) else is_real.to(self.weight.device), persistent=False
        )
        place(self.weight, shard, process_group.rank())
        if self.bias is not None and sequence is not None:
            place(self.bias, Shared(size=process_group.size()), process_group.rank())

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "Linear1D_Row":
        """See the class for the arguments; takes an nn.Linear."""
        return Linear1D_Row(module, process_group, **kwargs)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I/T) in, or (B, S, I) with `split_input`; (B, S, O) out, equal on all ranks, or a part of S."""
        if self.split_input:
            x_BSI = scatter_to(x_BSI, self.group, -1)
        if self._is_real is not None:
            x_BSI = x_BSI * self._is_real.to(x_BSI.dtype)
        if self._split_random is not None and self.training:
            self._split_random.leave()
        out_BSO = self._summed_product(x_BSI)
        return out_BSO if self.bias is None else out_BSO + self.bias

    def _summed_product(self, x_BSI: Tensor) -> Tensor:
        sequence = self.sequence
        if sequence is None:
            return reduce_from(self._product(x_BSI, None), self.group)
        has_steps = sequence.style == "ring" or sequence.overlap
        if has_steps and self.weight.is_leaf and not torch.is_autocast_enabled(x_BSI.device.type):
            keep = Keep(
                parameter=self.weight,
                is_transposed=self.output_dim == 1,
                store=self.weight_gradients,
                owner=self.gradient_owner,
            )
            return row_product(x_BSI, self.weight, sequence, keep)
        return leave(self._product(x_BSI, None), sequence)


def _sizes(weight: Tensor, dim: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(sizes) if sizes is not None else (weight.shape[dim],)


class _Transposed(_SplitLinear):
    """For transformers' Conv1D, which holds (I, O)."""

    native_class = Conv1D
    output_dim = 1


class GPT2FusedLinearConv1D_Col(_Transposed, Linear1D_Col):
    """`Linear1D_Col` for transformers' Conv1D; `split_sizes` where it is fused."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "GPT2FusedLinearConv1D_Col":
        """See `Linear1D_Col` for the arguments; takes a transformers Conv1D."""
        return GPT2FusedLinearConv1D_Col(module, process_group, **kwargs)


class GPT2FusedLinearConv1D_Row(_Transposed, Linear1D_Row):
    """`Linear1D_Row` for transformers' Conv1D."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "GPT2FusedLinearConv1D_Row":
        """See `Linear1D_Row` for the arguments; takes a transformers Conv1D."""
        return GPT2FusedLinearConv1D_Row(module, process_group, **kwargs)
