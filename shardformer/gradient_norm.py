"""Clipping the gradients of a split model without a booster. With one, the optimizer clips."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..cluster.collectives import all_gather
from ..cluster.placement import is_counted
from ..pipeline.stage import local_stages
from .whole_gradients import axes_of, is_split


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a model that `ShardFormer` split to a norm: that of the whole model's.

    torch.nn.utils.clip_grad_norm_ would take each rank's pieces for the whole: every rank would clip by another norm.
    An all-gather of one number over the tensor axis, whose ranks all call.

    Args:
        model: what `shard_model` or `ShardFormer.optimize` returned, or one that was not split.
        max_norm: gradients of a larger norm are scaled down to it; `inf` measures alone.
        norm_type: the p of the norm, `inf` for the largest magnitude.
        error_if_nonfinite: raise where the norm is infinite or NaN.

    Returns:
        The norm before clipping, 0-d float32, equal on all ranks.

    Raises:
        ValueError: a plugin split the model, or a number is out of its range.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise ValueError(
            f"max_norm={max_norm} must be at least 0 and norm_type={norm_type} above 0, or inf each"
        )
    if any(stage.bounds for stage in local_stages(model).values()):
        raise ValueError(
            "this model is one stage of a pipeline, which is not the whole: clip by a booster's optimizer"
        )
    axes = axes_of(model)
    parameters = list(model.parameters())
    if axes is None and is_split(model):
        raise ValueError(
            "no ShardFormer split this model: under a booster call optimizer.clip_grad_by_norm(max_norm)"
        )
    group = None if axes is None else axes.tensor
    rank = 0 if group is None else group.rank()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    counted = [each.grad for each in parameters if each.grad is not None and is_counted(each, rank)]
    norm = _norm(counted, norm_type, parameters[0].device if parameters else torch.device("cpu"))
    if group is not None:
        norm = torch.linalg.vector_norm(all_gather(norm[None], group, 0), norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}")
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
    return norm.float()


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Of all together, 0-d float64: long sums of float32 squares lose digits."""
    norms = [torch.linalg.vector_norm(each, norm_type, dtype=torch.float64).to(device) for each in gradients]
    none = torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack([none, *norms]), norm_type)
