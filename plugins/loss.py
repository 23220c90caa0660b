"""The loss of a batch, over the microbatches and replicas that have a part of it."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.mesh import ParallelMesh
from ..pipeline.runner import Criterion, RunResult


class PipelineLoss(Tensor):
    """The loss that `execute_pipeline` returns in training: a tensor without a graph, whose `backward` says so.

    Whatever is computed of it, and what is saved of it, is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Not to be called.

        Raises:
            RuntimeError: always; says what to call.
        """
        raise RuntimeError(
            "loss.backward() after execute_pipeline, which has computed the gradients already: leave it out, and call "
            "optimizer.step() next"
        )

    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self._plain(), memo)

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of a global batch, equal on all ranks.

    Args:
        figures_R3: loss, weight, and 1 where there are weights, of each replica; or the sum of them in one row.
        num_replicas: over how many replicas.
        is_weighted: whether the criterion returned (loss_sum, weight).
    """

    figures_R3: Tensor
    num_replicas: int
    is_weighted: bool

    @property
    def weight(self) -> Tensor:
        """The sum of all weights, 0-d."""
        return self.figures_R3[:, 1].sum()

    @property
    def mean(self) -> Tensor:
        """The loss whose gradient is taken: the mean over replicas, or the sum of losses over that of weights."""
        return self.figures_R3[:, 0].sum() / (self.weight if self.is_weighted else self.num_replicas)

    def of_replica(self, replica: int) -> Tensor:
        """The loss of one replica alone, where there is a row for each."""
        loss, weight, _ = self.figures_R3[replica]
        return loss / weight if self.is_weighted else loss.clone()


def reduced_loss(
    result: RunResult | None, mesh: ParallelMesh, *, num_microbatches: int, by_replica: bool
) -> Tensor:
    """Loss, weight, and 1 where there are weights, of each replica, or their sums in one row; float32, on every rank.

    One all-reduce over the world, where there are stages or replicas.

    Args:
        result: of a rank of the last stage; None on the others.
        mesh: the ranks.
        num_microbatches: of this replica, whose mean is its loss where there are no weights.
        by_replica: keep the replicas apart.
    """
    is_reduced = mesh.size("pp", "dp") > 1
    # float32 whatever torch's default is.
    figures_R3 = torch.zeros(mesh.size("dp") if by_replica else 1, 3, dtype=torch.float32, device=mesh.device)
    # The other ranks of a replica have the same.
    is_counted = mesh.rank("tp") == mesh.rank("sp") == 0 or not is_reduced
    if result is not None and is_counted:
        own = figures_R3[mesh.rank("dp") if by_replica else 0]
        own[0] = torch.stack([loss.float() for loss in result.losses]).sum()
        if result.weights is None:
            own[0] /= num_microbatches
        else:
            own[1] = torch.stack([weight.float() for weight in result.weights]).sum()
            own[2] = 1
    if is_reduced:
        dist.all_reduce(figures_R3)
    return figures_R3


class Weighting:
    """A criterion, with how much of a microbatch's loss is differentiated: its share of the batch."""

    def __init__(self, criterion: Criterion, *, num_microbatches: int, first_weight: float) -> None:
        self.criterion = criterion
        self.num_microbatches = num_microbatches
        self.first_weight = first_weight
        self.is_weighted = False

    def __call__(self, outputs: Any, inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        computed = self.criterion(outputs, inputs)
        self.is_weighted = isinstance(computed, tuple)
        return computed

    def share(self, loss: Tensor) -> Tensor:
        """The part that is differentiated: of a mean an equal one, of a sum what the first weight leaves."""
        return loss / (self.first_weight if self.is_weighted else self.num_microbatches)


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    """The loss that a model computes of its labels."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError(
            "the model's outputs hold no loss: give labels in the batch, or a criterion of (outputs, inputs)"
        )
    return loss
