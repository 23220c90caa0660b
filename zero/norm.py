"""The norm of all gradients of a model, under every layout. Which gradients a rank counts is bucket.py."""

from collections.abc import Sequence
from math import isinf

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.small_numbers import all_reduce_

# float32 sums of this many squares lose nothing that matters; longer ones do (6e-4 for 16M entries on CPU).
_ROW = 1024


def norm_over_all_ranks(
    counted: Sequence[Tensor],
    watched: Sequence[Tensor],
    *,
    norm_type: float,
    device: torch.device,
    code: int = 0,
) -> tuple[Tensor, Tensor]:
    """The norm of what all ranks of the world count together. One all-reduce over the world.

    Args:
        counted: this rank's 1-D gradients; each gradient of the model is counted on one rank alone.
        watched: gradients that another rank counts. They add nothing, but make the norm not finite where they
            are not: an overflow on one rank is one on all.
        norm_type: the p of the p-norm; `inf` is the largest magnitude.
        device: where the sum is built.
        code: below 2**32; compared between all ranks on the way.

    Returns:
        The norm, 0-d float64, equal on all ranks; infinite or NaN where any gradient of any rank is. And whether all
        ranks gave the same code, 0-d.
    """
    norms = [_norm(x, norm_type) for x in counted] + [_norm(x, norm_type) * 0 for x in watched]
    local = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms])
    if isinf(norm_type):
        # A maximum over ranks may drop a NaN (gloo's does), never an infinity.
        largest = torch.where(local.isfinite(), local, torch.inf).max()
        figures = torch.cat([largest.view(1), _numbers(code, -code, device=device)])
        norm, highest, negated_lowest = all_reduce_(figures, dist.ReduceOp.MAX)
        return norm, highest == -negated_lowest
    # Sums of such integers are exact in float64. The codes of two kinds of ranks cannot add up to that of the first.
    first = code if dist.get_rank() == 0 else 0
    figures = torch.cat([local.pow(norm_type).sum().view(1), _numbers(code, first, device=device)])
    total, codes, of_first = all_reduce_(figures, dist.ReduceOp.SUM)
    return total.pow(1 / norm_type), codes == of_first * dist.get_world_size()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What clips gradients of this norm, as in torch.nn.utils.clip_grad_norm_. 0 never clips."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def _numbers(*values: float, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _norm(x: Tensor, norm_type: float) -> Tensor:
    """The norm of a 1-D float32 tensor, float64: float32 within rows, float64 over them."""
    whole = x.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), norm_type, dim=1)
    if whole < x.numel():
        rest = torch.linalg.vector_norm(x[whole:], norm_type)
        rows = torch.cat([rows, rest.view(1)])
    return torch.linalg.vector_norm(rows, norm_type, dtype=torch.float64)
