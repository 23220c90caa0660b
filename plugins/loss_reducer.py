"""Reduction of the losses of a batch over all replicas, and the factor that corrects its gradients.

[Note: weights of microbatches] The loss of a batch is the sum of all microbatches' loss sums over the sum of their
weights, so it is exact for any distribution of labels. A backward starts from loss_sum / divisor. The divisor is a
power of two of the size of a replica's weight, fixed beforehand and equal on all ranks. It scales gradients to the
magnitude of a mean, and rounds nothing. The optimizer multiplies reduced gradients by divisor·d / (sum of weights) in
float32; d is the number of replicas.
"""

import logging
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.collectives import all_reduce
from ..cluster.mesh import ParallelMesh
from ..pipeline.counted_loss import ObservedStage
from ..zero.optimizer import ShardedOptimizer

_LOG = logging.getLogger("echelon")

LossReduction = Literal["global", "microbatch_mean"]
LOSS_REDUCTIONS: tuple[str, ...] = get_args(LossReduction)
# The source of a microbatch's weight: "labels" that the model's loss counted, the weight that the "criterion" returned,
# or "samples". A "sum" adds up over microbatches, and so does a "mean" over microbatches ("microbatch_mean"): the batch
# has the weight 1.
WeightSource = Literal["labels", "criterion", "samples", "sum", "mean"]
# The model's loss: the very result of one loss function, terms that are weighed separately, or neither.
LossStructure = Literal["single", "several", "other"]
# Weights that are not known before the first microbatch runs.
COUNTED: tuple[WeightSource, ...] = ("labels", "criterion")


class LossFigures(NamedTuple):
    """Numbers of a replica's batch that are reduced together, each a float or 0-d tensor.

    Args:
        loss_sum: the sum of the microbatches' loss sums.
        weight: the sum of their weights.
        divisor: see [Note: weights of microbatches].
        kind: see `WeightedCriterion.kind`.
        deviation: see `WeightedCriterion`.
        replica_loss: the loss of this replica's batch.
    """

    loss_sum: Tensor
    weight: Tensor
    divisor: Tensor
    kind: float | Tensor
    deviation: float | Tensor
    replica_loss: Tensor


class BatchLoss(NamedTuple):
    """The reduced loss of a batch, equal on all ranks except `of_replica`.

    Args:
        mean: the loss over all replicas, 0-d.
        of_replica: the loss of this replica alone, 0-d.
        factor: by which the optimizer multiplies the reduced gradients, 0-d.
        kinds: by replica, the kind of its loss, see `WeightedCriterion.kind`.
        deviation: 0-d, above 0 if terms of the loss counted otherwise than expected.
    """

    mean: Tensor
    of_replica: Tensor
    factor: Tensor
    kinds: Tensor
    deviation: Tensor


class LossReducer:
    """Reduces the losses of a model's calls and remembers their structure; see [Note: weights of microbatches].

    Args:
        mesh: all ranks.
        last_rank: the pipeline rank of the last stage.
        stage: the last stage; None on other ranks.
        reduction: "global", or "microbatch_mean": the mean over replicas of the mean over microbatches.

    Attributes:
        structures: the structure of the model's loss, by True for training and False for evaluation.
        divisors: for the next call, by the source of its weights.
        last_divisor: of the last call in training, which accumulated calls share.
    """

    def __init__(
        self, mesh: ParallelMesh, last_rank: int, stage: ObservedStage | None, reduction: LossReduction
    ) -> None:
        self.mesh, self.stage, self.reduction = mesh, stage, reduction
        self._last_rank = last_rank
        self.structures: dict[bool, LossStructure] = {}
        self.divisors: dict[WeightSource, Tensor] = {}
        self.last_divisor: Tensor | None = None
        # By True for training, False for evaluation: the number of terms if all replicas have as many; otherwise 0.
        self._num_terms: dict[bool, int] = {}
        self._logged: set[str] = set()  # messages

    def set_structure(self, structure: LossStructure, *, trains: bool) -> None:
        """Keep the first structure that the model's loss has; a later "several" replaces it."""
        if structure == "several" or trains not in self.structures:
            self.structures[trains] = structure

    def agreed_num_terms(self, number: int, *, trains: bool, compares: bool) -> int | None:
        """Return the number of terms that the loss has on all replicas; None if their numbers differ.

        All-reduce over dp of last stages in compared calls of training, and in the first evaluation. Other calls return
        the number of the last comparison: evaluations of a model have one loss.

        Args:
            number: the terms of this replica's loss; 0 for a loss that is not weighed by terms.
            trains: gradients are enabled.
            compares: this is a compared call of training.
        """
        num_replicas = self.mesh.size("dp")
        if num_replicas == 1:
            return number
        if compares or trains not in self._num_terms:
            numbers = torch.full((2,), number, dtype=torch.float64, device=self.mesh.device)
            numbers[1] = number**2
            total, squares = self.sum_over_replicas(numbers)
            is_agreed = bool(squares * num_replicas == total**2)  # the variance is 0
            self._num_terms[trains] = number if is_agreed else 0
            if not is_agreed:
                return None
        return self._num_terms[trains]

    def sum_over_replicas(self, numbers: Tensor) -> Tensor:
        """Return the sum over replicas. All-reduce over dp of last stages."""
        return numbers if self.mesh.size("dp") == 1 else all_reduce(numbers, self.mesh.group("dp"))

    def log_once(self, message: str) -> None:
        """Log a message once, on the first rank of the last stage."""
        if message not in self._logged and self.mesh.rank("data") == self.mesh.rank("tp") == 0:
            _LOG.warning(message)
        self._logged.add(message)

    @property
    def adds_losses(self) -> bool:
        """True on the one rank of each replica whose losses are reduced: all ranks of its last stage have them."""
        is_first = self.mesh.rank("tp") == self.mesh.rank("sp") == 0 or self.mesh.size("pp", "dp") == 1
        return self.mesh.rank("pp") == self._last_rank and is_first

    def reduced(
        self,
        figures: LossFigures | None,
        *,
        trains: bool,
        weight_source: WeightSource,
        accumulation_steps: int,
    ) -> BatchLoss:
        """Return the loss of a batch. All-reduce over the world if there are stages or replicas.

        In training it also keeps the divisor, and chooses the next call's.

        Args:
            figures: of this replica; None on ranks without `adds_losses`.
            trains: gradients are enabled.
            weight_source: of the microbatches' weights.
            accumulation_steps: calls whose mean the optimizer's step uses.
        """
        num_replicas, replica = self.mesh.size("dp"), self.mesh.rank("dp")
        # By replica R, in the order of `LossFigures`; float32 whatever torch's default is.
        figures_R6 = torch.zeros(
            num_replicas, len(LossFigures._fields), dtype=torch.float32, device=self.mesh.device
        )
        if figures is not None:
            for index, figure in enumerate(figures):
                figures_R6[replica, index] = figure
        if self.mesh.size("pp", "dp") > 1:
            dist.all_reduce(figures_R6)
        losses, weights, divisors, kinds, deviations, of_replicas = figures_R6.unbind(1)
        weight = weights.sum()
        if trains:
            self.last_divisor = divisors[0]
            if weight_source in COUNTED:
                self.divisors[weight_source] = power_of_two(weight / num_replicas)
        correction = divisors[0] * (num_replicas * accumulation_steps)
        return BatchLoss(
            mean=losses.sum() / weight,
            of_replica=of_replicas[replica],
            factor=torch.where(weight != 0, correction / weight, 0.0),
            kinds=kinds,
            deviation=deviations.sum(),
        )


def power_of_two(number: Tensor) -> Tensor:
    """Return the largest power of two up to a number, at least 1, without waiting for the device."""
    bits = number.float().abs().clamp_min(1).view(torch.int32)
    return (bits & 0x7F800000).view(torch.float32)


def set_gradient_factor(optimizer: ShardedOptimizer, factor: Tensor) -> None:
    """Set `optimizer.gradient_factor`, by which its step multiplies the reduced gradients.

    With several accumulation steps, combine it with the factor of the earlier calls of this step.

    Args:
        optimizer: changed.
        factor: `BatchLoss.factor` of this call.
    """
    previous = optimizer.gradient_factor
    if optimizer.accumulation_steps > 1 and isinstance(previous, Tensor):
        # Their weights add up, as of one larger batch: 1 / factor is proportional to the weight of a call.
        factor = _inverse(_inverse(previous) + _inverse(factor))
    optimizer.gradient_factor = factor


def _inverse(factor: Tensor) -> Tensor:
    """Return 1 / factor, and 0 for the factor 0 of a batch without labels."""
    return torch.where(factor != 0, 1 / factor, 0.0)
