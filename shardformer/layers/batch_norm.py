"""Batch normalization over the samples of one replica, or of all, with running statistics in float32."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...cluster.collectives import all_reduce, gather_to
from .class_change import change_class

# B batch, C channels, R ranks


class _RecomputableBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's batch norm that counts a recomputed batch once, and allows 16-bit weights with float32 statistics.

    Attributes:
        over: ranks whose samples are normalized together; None is this rank alone.
    """

    over: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize as torch does, but update no running statistics in a recomputation."""
        self._check_input_dim(x)
        uses_batch = self.training or self.running_mean is None  # not the running statistics
        is_recomputed = torch._C._current_graph_task_id() != -1
        updates_statistics = self.training and self.running_mean is not None and not is_recomputed
        momentum = self._count_batch() if updates_statistics else 0.0
        if self.training and self.over is not None and self.over.size() > 1:
            return self._normalized_together(x, momentum, self.over)
        mean, variance = self.running_mean, self.running_var
        if self.training and is_recomputed and mean is not None and variance is not None:
            # Copies, not None: recomputation must save as many tensors as forward did.
            mean, variance = mean.clone(), variance.clone()
        weight, bias = self._in_format_of(mean, self.weight), self._in_format_of(mean, self.bias)
        return F.batch_norm(x, mean, variance, weight, bias, uses_batch, momentum, self.eps)

    def _count_batch(self) -> float:
        """Count this batch, and return the weight of its statistics in the running ones."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / self.num_batches_tracked.item()
        return self.momentum or 0.0

    def _in_format_of(self, running: Tensor | None, parameter: Tensor | None) -> Tensor | None:
        """Return a parameter in the format of the running statistics, or unchanged without them."""
        # torch's kernels accept 16-bit inputs if all other tensors are float32, but no mixture of those.
        return parameter if running is None or parameter is None else parameter.to(running.dtype)

    def _normalized_together(self, x: Tensor, momentum: float, group: dist.ProcessGroup) -> Tensor:
        """Normalize by the samples of all ranks, and update the running statistics unless `momentum` is 0.

        One all-gather; backward: one reduce-scatter.
        """
        x_float = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.ndim)]
        variance_C, mean_C = torch.var_mean(x_float, dims, correction=0)
        count_1 = mean_C.new_full((1,), x.numel() / x.shape[1])  # values of each channel
        moments_R = gather_to(torch.cat([mean_C, variance_C, count_1]).unsqueeze(0), group, 0)
        means_RC, variances_RC, counts_R1 = moments_R.split([len(mean_C), len(variance_C), 1], 1)
        counts_R1 = counts_R1.detach()
        weights_R1 = counts_R1 / counts_R1.sum()
        mean_C = (weights_R1 * means_RC).sum(0)
        variance_C = (weights_R1 * (variances_RC + (means_RC - mean_C).square())).sum(0)
        if momentum:
            bessel = counts_R1.sum() / (counts_R1.sum() - 1)  # torch's running variance is unbiased
            self._update_statistics(mean_C.detach(), variance_C.detach() * bessel, momentum)
        shape = (1, -1, *(1 for _ in dims[1:]))
        out = (x_float - mean_C.view(shape)) * torch.rsqrt(variance_C + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.to(out.dtype).view(shape) + self.bias.to(out.dtype).view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean_C: Tensor, variance_C: Tensor, momentum: float) -> None:
        """Move the running statistics towards those of a batch, which get the weight `momentum`."""
        assert self.running_mean is not None and self.running_var is not None
        self.running_mean.lerp_(mean_C, momentum)
        self.running_var.lerp_(variance_C, momentum)


class _RecomputableBatchNorm1d(_RecomputableBatchNorm, nn.BatchNorm1d):
    pass


class _RecomputableBatchNorm2d(_RecomputableBatchNorm, nn.BatchNorm2d):
    pass


class _RecomputableBatchNorm3d(_RecomputableBatchNorm, nn.BatchNorm3d):
    pass


# Not a subclass of torch's SyncBatchNorm, which DistributedDataParallel refuses on CPUs.
class _RecomputableSyncBatchNorm(_RecomputableBatchNorm):
    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {x.ndim}D input)")


_REPLACEMENTS: dict[type, Any] = {
    nn.BatchNorm1d: _RecomputableBatchNorm1d,
    nn.BatchNorm2d: _RecomputableBatchNorm2d,
    nn.BatchNorm3d: _RecomputableBatchNorm3d,
    nn.SyncBatchNorm: _RecomputableSyncBatchNorm,
}


def convert_batch_norms(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Change the classes of batch norms: recomputation counts no batch twice, running statistics are float32.

    torch's SyncBatchNorm normalizes over its own process group, or else over the given one.

    Args:
        model: materialized.
        group: the data axis.
    """
    for module in model.modules():
        replacement = _REPLACEMENTS.get(type(module))
        if replacement is None:
            continue
        if isinstance(module, nn.SyncBatchNorm):
            module.over = module.process_group or group  # type: ignore[assignment]
        change_class(module, replacement)
        for name in ("running_mean", "running_var"):
            statistic = getattr(module, name)
            if statistic is not None and statistic.itemsize < torch.float32.itemsize:
                setattr(module, name, statistic.float())


def has_sync_batch_norm(model: nn.Module) -> bool:
    """Return True if forwards communicate over the data axis, so that all ranks must run the same number of them."""
    return any(isinstance(module, _RecomputableSyncBatchNorm) for module in model.modules())


class RunningStatistics:
    """The running statistics of a model, averaged over the ranks of a group.

    A running average is linear in its inputs, so averaging once per step gives the same result as after every batch.
    Statistics of SyncBatchNorm are left out, since they are equal on all ranks.

    Args:
        model: with its own running statistics on each rank.
        group: the ranks of the data axis.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self.names = [
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            and not isinstance(module, _RecomputableSyncBatchNorm)
            for name in ("running_mean", "running_var")
            if getattr(module, name) is not None
        ]
        self._model = model

    @torch.no_grad()
    def average(self) -> None:
        """Average all statistics over the ranks. One all-reduce, if there are any; the host does not wait."""
        if not self.names or self._group.size() == 1:
            return
        tensors = [self._model.get_buffer(name) for name in self.names]
        # In float64, where the mean of equal statistics is exact.
        flat = torch.cat([tensor.double().flatten() for tensor in tensors])
        flat = all_reduce(flat, self._group) / self._group.size()
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
