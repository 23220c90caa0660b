"""Fused projections of query, key and value with fewer key-value heads than ranks. All others are linear.py."""

# B batch, S sequence, I input features, T size of the group, D width of a head, Q widths of a rank's query heads
# K key-value heads in all, C ranks that share one: T = K × C

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.collectives import gather_to
from .linear import Linear1D_Col


class SharedKeyValueLinear1D_Col(Linear1D_Col):
    """A fused projection whose ranks hold whole query heads of their own, and a part each of a key-value head.

    The ranks that share a key-value head gather its key and value. So each weight lies on one rank alone, as those of
    the query heads beside them do, and no gradient has to be summed.

    Args:
        native: the projection; the outputs of each stretch are query heads, keys and values, side by side.
        process_group: the tensor axis, of size T.
        num_key_value_heads: K, a divisor of T; with heads of zeros where there are any.
        kwargs: of `Linear1D_Col`.
    """

    def __init__(
        self, native: nn.Module, process_group: dist.ProcessGroup, *, num_key_value_heads: int, **kwargs: Any
    ) -> None:
        super().__init__(native, process_group, **kwargs)
        self.num_key_value_heads = num_key_value_heads
        sizes = kwargs.get("padded_sizes") or kwargs["split_sizes"]
        self.part_width = sizes[-1] * kwargs.get("stretches", 1) // process_group.size()

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "SharedKeyValueLinear1D_Col":
        """See the class for the arguments; takes an nn.Linear."""
        return SharedKeyValueLinear1D_Col(module, process_group, **kwargs)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """(B, S, I) in, equal on all ranks; (B, S, Q + 2D) out. Forward all-gather, backward reduce-scatter."""
        out = super().forward(x_BSI)
        query_BSQ, parts = out.tensor_split([-2 * self.part_width], -1)
        ranks_per_head = self.group.size() // self.num_key_value_heads
        gathered_KC2 = gather_to(parts, self.group, -1).unflatten(
            -1, (self.num_key_value_heads, ranks_per_head, 2, self.part_width)
        )
        own_C2 = gathered_KC2.select(-4, self.group.rank() // ranks_per_head)
        return torch.cat([query_BSQ, own_C2.transpose(-3, -2).flatten(-3)], -1)
