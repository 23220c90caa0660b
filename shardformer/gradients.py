"""Gradients of a sharded model without a booster: summed and averaged by hooks during backward, and clipped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..cluster.collectives import all_gather, all_reduce
from ..cluster.device import numbers_on
from ..cluster.packing import packed
from ..cluster.placement import is_primary, num_summands, placements_of
from ..pipeline.stage import local_stages

_AXES = "_echelon_axes"
_BUCKET_SIZE = 2**22  # elements per all-reduce


@dataclass(frozen=True)
class Axes:
    """The axes over which hooks reduce a model's gradients without a booster; None is an axis of one rank.

    Args:
        tensor: the ranks with different shards.
        data: the ranks with equal shards and different batches.
        average: the hooks that average over `data`.
    """

    tensor: ProcessGroup | None
    data: ProcessGroup | None
    average: "DataAverage | None"


def axes_of(model: nn.Module) -> Axes | None:
    """Return the axes over which hooks reduce a model's gradients; None if `add_gradient_hooks` added none."""
    axes: Axes | None = vars(model).get(_AXES)
    return axes


def is_split(model: nn.Module) -> bool:
    """Return True if a plugin or ShardFormer processed the model: it has shards, or hooks for its gradients."""
    return axes_of(model) is not None or any(map(placements_of, model.parameters()))


def add_gradient_hooks(model: nn.Module, *, tensor: ProcessGroup | None, data: ProcessGroup | None) -> None:
    """Add hooks after which every backward leaves the local shard of the gradients that one process would compute.

    Over the tensor axis, partial gradients (norms inside a region, replicas of key-value heads) are all-reduced once
    per backward, before they are accumulated: gradient accumulation counts none twice. Over the data axis, all
    gradients are averaged at the end of a backward. Each backward is then collective over both axes: every rank calls
    it, and the graph is the same on all ranks of the tensor axis. Frozen parameters get hooks too, for a later use.

    Args:
        model: already sharded.
        tensor: the tensor axis; None is one rank.
        data: the data axis; None is one rank.
    """
    if tensor is None and data is None:
        return
    parameters = list(model.parameters())
    if tensor is not None:
        for parameter in parameters:
            if (num_ranks := num_summands(parameter, "tp")) > 1:
                with _with_gradient_required(parameter):
                    parameter.register_hook(_sum_hook(tensor, num_ranks))
    average = None if data is None else DataAverage(parameters, data)
    vars(model)[_AXES] = Axes(tensor, data, average)


class DataAverage:
    """Average gradients over the data axis at the end of each backward.

    Averaging equal gradients changes nothing, so later backwards may accumulate into averaged gradients. If only some
    ranks have a gradient of a parameter, it counts as zero on the others.

    Args:
        parameters: all parameters of the model, in the same order on all ranks.
        group: the data axis.
    """

    def __init__(self, parameters: Iterable[Parameter], group: ProcessGroup) -> None:
        self._parameters = list(parameters)
        self._group = group
        # Autograd's number of the last backward that queued the average. Not a flag: a failed backward never resets it.
        self._last_backward = -1
        for parameter in self._parameters:
            with _with_gradient_required(parameter):
                # A weak reference: the garbage collector does not follow the hooks of a tensor.
                parameter.register_post_accumulate_grad_hook(_call_weakly(WeakMethod(self._queue_average)))

    def _queue_average(self) -> None:
        """Queue the average at the end of this backward, once per backward."""
        backward = torch._C._current_graph_task_id()
        if backward != self._last_backward:
            self._last_backward = backward
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients over the ranks, in place. One all-reduce per bucket.

        With each gradient a flag is summed, which is positive if any rank has this gradient.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        for bucket in packed(trained, _BUCKET_SIZE, Tensor.numel):
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in bucket
            ]
            has_gradient = [float(parameter.grad is not None) for parameter in bucket]
            flags = numbers_on(bucket[0].device, has_gradient, torch.float32)
            # In float32 or wider, because a sum over many ranks in 16 bits would lose digits.
            addends = [
                gradient.to(torch.promote_types(gradient.dtype, torch.float32)).flatten()
                for gradient in gradients
            ]
            flat = torch.cat([*addends, flags])
            mean = all_reduce(flat, self._group) / self._group.size()
            *means, flags = mean.split([*(parameter.numel() for parameter in bucket), len(bucket)])
            # Read only if a gradient is missing here: reading waits for the device.
            of_any_rank = has_gradient if all(has_gradient) else flags.tolist()
            for parameter, gradient, total, is_used in zip(
                bucket, gradients, means, of_any_rank, strict=True
            ):
                if is_used:
                    parameter.grad = gradient.copy_(total.view_as(gradient))


def _sum_hook(group: ProcessGroup, num_ranks: int) -> Callable[[Tensor], Tensor]:
    """Return a hook that sums the partial gradients of each `num_ranks` neighbouring ranks of a group.

    One all-reduce, or an all-gather if the group has more ranks; all of them call it.
    """

    def summed(gradient: Tensor) -> Tensor:
        if num_ranks == group.size():
            return all_reduce(gradient, group)
        # Over the full group, since the neighbours have none: making one would be collective over the world.
        first = group.rank() // num_ranks * num_ranks
        return all_gather(gradient[None], group, 0)[first : first + num_ranks].sum(0)

    return summed


def _call_weakly(reference: WeakMethod) -> Callable[[Tensor], None]:
    """Return a hook of a parameter that calls a method, or does nothing once the method's object is freed."""

    def accumulated(parameter: Tensor) -> None:
        if (method := reference()) is not None:
            method()

    return accumulated


@contextmanager
def _with_gradient_required(parameter: Parameter) -> Iterator[None]:
    """Make a parameter require a gradient while a hook is added; the hook stays when it is frozen again."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(is_trained)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a model that `ShardFormer` sharded by their global norm, in place.

    torch.nn.utils.clip_grad_norm_ would use the norm of the local shards, so every rank would clip differently.
    One all-gather of a number over the tensor axis, so all its ranks must call.

    Args:
        model: the result of `shard_model` or `ShardFormer.optimize`, or a model that was not sharded.
        max_norm: gradients with a larger norm are scaled down to it; `inf` only measures.
        norm_type: the p of the norm, `inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is infinite or NaN.

    Returns:
        The norm before clipping, 0-d float32, equal on all ranks.

    Raises:
        ValueError: a plugin sharded the model, or a number is out of range.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise ValueError(
            f"max_norm={max_norm} must be at least 0 and norm_type={norm_type} above 0, or inf each"
        )
    if any(stage.bounds for stage in local_stages(model).values()):
        raise ValueError(
            "this model has only one stage of a pipeline: clip its gradients by a booster's optimizer"
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
    coordinate = {"tp": rank}.__getitem__  # by axis; a shard counts on one of the ranks that have it
    primary = [parameter for parameter in parameters if is_primary(parameter, coordinate)]
    counted = [parameter.grad for parameter in primary if parameter.grad is not None]
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
    """Return the norm of all gradients, 0-d float64: long sums of float32 squares lose digits."""
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64).to(device)
        for gradient in gradients
    ]
    zero = torch.zeros((), dtype=torch.float64, device=device)  # the norm without gradients
    return torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)
