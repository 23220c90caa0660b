"""Base class of contenders that give each rank its samples of a batch."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from stepped import OneBatch
from torch import Tensor
from workload import Workload

from echelon.zero.slot import ShardedGradient


class DataParallel(OneBatch):
    """Replicas of a model, sharded or not, over all ranks of the run; each computes its samples of the batch."""

    def loss(self) -> Tensor:
        """Return the mean loss of all ranks' samples. One all-reduce."""
        assert self._loss is not None
        mean = self._loss / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return parameters, gradients and optimizer states on this rank; the optimizer may have other parameters."""
        groups = self._optimizer.param_groups
        parameters = [
            *self._model.parameters(),
            *(parameter for group in groups for parameter in group["params"]),
        ]
        return {
            "parameters": parameters,
            "gradients": [
                parameter.grad
                for parameter in parameters
                # At stage 2 a placeholder replaces a sharded gradient.
                if parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient)
            ],
            "states": tensors_in(self.states()),
        }


def local_samples(workload: Workload, device: torch.device) -> dict[str, Tensor]:
    """Return this rank's samples of the batch; all ranks have the same number.

    Raises:
        ValueError: the batch is not divisible by the number of ranks.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if workload.batch % num_ranks:
        raise ValueError(
            f"--batch {workload.batch} must be a multiple of --dp {num_ranks}: means over ranks of unequal "
            "numbers of samples are not those over the batch"
        )
    size = workload.batch // num_ranks
    return {name: tensor.split(size)[rank] for name, tensor in workload.data(device).items()}


def tensors_in(states: Mapping[Any, Mapping[str, Any]]) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
