"""Attention put together from blocks of keys. What a block yields is kernels.py's."""

import torch
from torch import Tensor

# B batch, N heads, Q queries, D head dim


class OnlineSoftmax:
    """Results of attention to the keys seen so far, kept in float32 or wider.

    Args:
        q_BNQD: the queries.
        width: of values.

    Attributes:
        out_BNQD: the results; 0 for queries that have seen nothing.
        lse_BNQ: the logarithm of the sum of the exponentials of their scores; minus infinity where nothing was seen.
    """

    def __init__(self, q_BNQD: Tensor, width: int) -> None:
        dtype = torch.promote_types(q_BNQD.dtype, torch.float32)
        self.out_BNQD = q_BNQD.new_zeros((*q_BNQD.shape[:3], width), dtype=dtype)
        self.lse_BNQ = q_BNQD.new_full(q_BNQD.shape[:3], -torch.inf, dtype=dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Let some queries see further keys, of which alone they would have had these results."""
        out_before, lse_before = self.out_BNQD[:, :, rows], self.lse_BNQ[:, :, rows]
        lse_after = torch.logaddexp(lse_before, lse)
        scale = lse_after.masked_fill(lse_after == -torch.inf, 0)  # infinity less infinity is no number
        out_before.mul_((lse_before - scale).exp_().unsqueeze(-1))
        out_before.add_(out * (lse - scale).exp_().unsqueeze(-1))
        lse_before.copy_(lse_after)
