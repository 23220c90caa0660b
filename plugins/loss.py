"""The loss of a batch: the weight of each microbatch in it, and its reduction over all replicas.

[Note: weights of microbatches] The loss of a batch is the sum of all microbatches' loss sums over the sum of their
weights, so it is exact for any distribution of labels. A backward starts from loss_sum / divisor. The divisor is a
power of two of the size of a replica's weight, fixed beforehand and equal on all ranks. It scales gradients to the
magnitude of a mean, and rounds nothing. The optimizer multiplies reduced gradients by divisor·d / (sum of weights) in
float32; d is the number of replicas.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.collectives import all_reduce
from ..cluster.device import numbers_on
from ..cluster.mesh import ParallelMesh
from ..pipeline.counted_loss import Observed, ObservedStage
from ..pipeline.microbatch import batch_size
from ..pipeline.runner import Criterion, RunResult, loss_and_weight
from ..zero.optimizer import ShardedOptimizer
from .loss_terms import GlobalCounts, Term, expected_counts, has_rest, require_known_parameters, terms_of

_LOG = logging.getLogger("echelon")

LossReduction = Literal["global", "microbatch_mean"]
LOSS_REDUCTIONS: tuple[str, ...] = get_args(LossReduction)
# The weight of a microbatch: observed labels, the weight that a criterion returns, or samples. Sums add up, and
# "microbatch_mean" averages.
_WeighedBy = Literal["labels", "criterion", "samples", "sum", "mean"]
# The model's loss: the very result of one loss function, terms that are weighed separately, or neither.
_Structure = Literal["single", "several", "other"]
# Weights that are not known before the first microbatch runs.
_COUNTED: tuple[_WeighedBy, ...] = ("labels", "criterion")
_BY_SAMPLES = (
    "the model's loss is no sum of means over labels, so each microbatch weighs as many as its samples; see "
    "docs/decisions/loss.md"
)


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    """Return the loss that a model computes from the labels in its inputs."""
    loss = _field(outputs, "loss")
    if loss is None:
        raise ValueError(
            "the model's outputs contain no loss: give labels in the batch, without return_dict=False, or a criterion "
            "of (outputs, inputs)"
        )
    return loss


def _field(outputs: Any, name: str) -> Any:
    """Return an entry of a model's outputs; None if they have none."""
    return outputs.get(name) if hasattr(outputs, "get") else getattr(outputs, name, None)


class BatchLoss(NamedTuple):
    """The reduced loss of a batch, equal on all ranks except `of_replica`.

    Args:
        mean: over all replicas.
        of_replica: of this replica alone.
        factor: of the reduced gradients.
        kinds: by replica, the kind of its loss, see `WeighedCriterion.kind`.
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
        mesh: the mesh.
        last_rank: the pipeline rank of the last stage.
        stage: the last stage, where this rank has it.
        reduction: "global", or "microbatch_mean": the mean over replicas of the mean over microbatches.
    """

    def __init__(
        self, mesh: ParallelMesh, last_rank: int, stage: ObservedStage | None, reduction: LossReduction
    ) -> None:
        self.mesh, self.stage, self.reduction = mesh, stage, reduction
        self._last_rank = last_rank
        self._divisors: dict[str, Tensor] = {}  # of the next call, by `_WeighedBy`
        # By True for training, False for evaluation:
        self.structures: dict[bool, _Structure] = {}
        self._num_terms: dict[bool, int] = {}  # of a loss of several terms on all replicas; otherwise 0
        self._last_divisor: Tensor | None = None  # which accumulated calls share
        self._has_noted: set[str] = set()

    def of_batch(
        self,
        criterion: Criterion,
        microbatches: Sequence[Any],
        optimizer: ShardedOptimizer | None,
        *,
        compares: bool,
        mean_samples: float,
    ) -> "WeighedCriterion":
        """Return the criterion of one call, with weights.

        Args:
            criterion: of the call.
            microbatches: of this replica.
            optimizer: in training.
            compares: the call is compared between ranks, so last stages may communicate.
            mean_samples: samples of a replica in the last compared call.
        """
        accumulates = (
            optimizer is not None
            and optimizer.accumulation_steps > 1
            and isinstance(optimizer.gradient_factor, Tensor)
        )
        if self.stage is not None:
            structure = self.structures.get(torch.is_grad_enabled())
            self.stage.separate = self.reduction == "global" and structure in (None, "several")
        return WeighedCriterion(
            self,
            criterion,
            microbatches,
            divisor=self._last_divisor if accumulates else None,
            compares=compares and optimizer is not None,
            mean_samples=mean_samples,
        )

    def set_structure(self, structure: _Structure, *, trains: bool) -> None:
        """Note the structure of the model's loss; of one that changes, that of several terms."""
        if structure == "several" or trains not in self.structures:
            self.structures[trains] = structure

    def agreed_terms(self, number: int, criterion: "WeighedCriterion") -> int | None:
        """Return the number of terms of the loss; None if replicas have different numbers.

        All-reduce over dp of last stages in compared calls of training, and in the first evaluation.
        """
        num_replicas, trains = self.mesh.size("dp"), criterion.trains
        if num_replicas == 1:
            return number
        if criterion.compares or trains not in self._num_terms:
            numbers = torch.full((2,), number, dtype=torch.float64, device=self.mesh.device)
            numbers[1] = number**2
            total, squares = self.over_replicas(numbers)
            is_agreed = bool(squares * num_replicas == total**2)  # equal numbers have no variance
            self._num_terms[trains] = number if is_agreed else 0
            if not is_agreed:
                return None
        return self._num_terms[trains]

    def over_replicas(self, numbers: Tensor) -> Tensor:
        """Return the sum over replicas. All-reduce over dp of last stages."""
        return numbers if self.mesh.size("dp") == 1 else all_reduce(numbers, self.mesh.group("dp"))

    def note(self, message: str) -> None:
        """Log a message once, on the first rank of the last stage."""
        if message not in self._has_noted and self.mesh.rank("data") == self.mesh.rank("tp") == 0:
            _LOG.warning(message)
        self._has_noted.add(message)

    def reduced(self, result: RunResult, criterion: "WeighedCriterion", accumulation_steps: int) -> BatchLoss:
        """Return the loss of a batch. All-reduce over the world if there are stages or replicas."""
        num_replicas, replica = self.mesh.size("dp"), self.mesh.rank("dp")
        is_reduced = self.mesh.size("pp", "dp") > 1
        # For each replica R: loss, weight, divisor, kind of the loss, above 0 if terms counted otherwise than expected,
        # and the loss of the replica; float32 whatever torch's default is.
        figures_R6 = torch.zeros(num_replicas, 6, dtype=torch.float32, device=self.mesh.device)
        # All ranks of a replica have the same values: one of them adds them.
        is_counted = self.mesh.rank("tp") == self.mesh.rank("sp") == 0 or not is_reduced
        if self.mesh.rank("pp") == self._last_rank and is_counted:
            assert result.weights is not None and criterion.divisor is not None
            figures_R6[replica, 0] = torch.stack([loss.float() for loss in result.losses]).sum()
            figures_R6[replica, 1] = torch.stack([weight.float() for weight in result.weights]).sum()
            figures_R6[replica, 2] = criterion.divisor
            figures_R6[replica, 3] = criterion.kind
            figures_R6[replica, 4] = criterion.deviation
            figures_R6[replica, 5] = criterion.replica_loss(figures_R6[replica])
        if is_reduced:
            dist.all_reduce(figures_R6)
        losses, weights, divisors, kinds, deviations, of_replicas = figures_R6.unbind(1)
        weight = weights.sum()
        if criterion.trains:
            self._last_divisor = divisors[0]
            if criterion.weighed_by in _COUNTED:
                self._divisors[criterion.weighed_by] = _power_of_two(weight / num_replicas)
        correction = divisors[0] * (num_replicas * accumulation_steps)
        return BatchLoss(
            mean=losses.sum() / weight,
            of_replica=of_replicas[replica],
            factor=torch.where(weight != 0, correction / weight, 0.0),
            kinds=kinds,
            deviation=deviations.sum(),
        )

    def divisor_of(self, criterion: "WeighedCriterion", weight: Tensor) -> Tensor:
        """Return the divisor of a call, from the weight of its first microbatch.

        In compared calls all-reduce over dp of last stages.
        """
        weighed_by, num_replicas = criterion.weighed_by, self.mesh.size("dp")
        is_counted = weighed_by in _COUNTED
        if not criterion.trains:
            return torch.ones((), device=self.mesh.device)
        estimate = weight.float() * (len(criterion.microbatches) if is_counted else 0)
        if criterion.compares and num_replicas > 1:
            estimate = all_reduce(estimate, self.mesh.group("dp")) / num_replicas
        if weighed_by in self._divisors:
            return self._divisors[weighed_by]
        has_estimate = criterion.compares or num_replicas == 1  # that replicas have in common
        if weighed_by == "samples" or (is_counted and not has_estimate):
            (estimate,) = numbers_on(self.mesh.device, [criterion.mean_samples], torch.float32)
        divisor = _power_of_two(estimate)
        if is_counted:
            self._divisors[weighed_by] = divisor
        return divisor


class _Weighed(NamedTuple):
    """The addend of a microbatch to the loss, and its weight."""

    weighed_by: _WeighedBy
    loss_sum: Tensor
    weight: Any


class WeighedCriterion:
    """A criterion of one call that returns (loss_sum, weight) of a microbatch, whatever the user's returns."""

    def __init__(
        self,
        reducer: LossReducer,
        criterion: Criterion,
        microbatches: Sequence[Any],
        *,
        divisor: Tensor | None,
        compares: bool,
        mean_samples: float,
    ) -> None:
        self.criterion, self.microbatches = criterion, microbatches
        self.compares, self.mean_samples, self.divisor = compares, mean_samples, divisor
        self.weighed_by: _WeighedBy = "samples"
        self.trains = torch.is_grad_enabled()
        self._reducer, self._num_calls = reducer, 0
        self._labels: list[Tensor] = []  # counted by a loss that is not used, in compared calls
        self._counts: GlobalCounts | None = None
        self.deviation: Tensor | float = 0.0

    def __call__(self, outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of a microbatch's loss and its weight, a tensor; the first call chooses terms and divisor."""
        loss, user_weight = loss_and_weight(self.criterion(outputs, inputs))
        is_first = self._num_calls == 0
        if is_first:
            stage = self._reducer.stage
            if self.trains and stage is not None and loss is not _field(outputs, "loss"):
                require_known_parameters(loss, outputs, stage.model)
            self._counts = self._counts_of(loss, outputs, inputs)
        if user_weight is None:
            weighed = self._weighed(loss, outputs, inputs)
        else:
            weighed = _Weighed("criterion", loss, user_weight)
        if not is_first and (weighed.weighed_by == "criterion") != (self.weighed_by == "criterion"):
            raise TypeError(
                "the criterion returned a weight for some microbatches only: return one for all or none"
            )
        self.weighed_by, loss_sum, weight = weighed
        self._num_calls += 1
        if isinstance(weight, Tensor):
            number = weight.to(loss.device)
        else:  # a kernel that fills: a copy would block the host
            number = torch.full((), float(weight), dtype=torch.float64, device=loss.device)
        if self.weighed_by in ("mean", "sum") and not is_first:
            number = torch.zeros_like(number)  # the first microbatch has the weight of all
        if is_first and self.divisor is None:
            self.divisor = self._reducer.divisor_of(self, number.detach())
        observed = self._observed
        if observed is not None and observed.lacks_graph and not has_rest(loss_sum, observed.losses):
            loss_sum = loss_sum.detach()  # the graph of its terms alone, which trains nothing
        return loss_sum, number

    @property
    def kind(self) -> float | Tensor:
        """A number that replicas have in common: a sum's `num_items_in_batch`, -1 for a criterion's weights, or 0."""
        if self.weighed_by == "criterion":
            return -1.0
        batch = self.microbatches[0]
        return batch["num_items_in_batch"] if self.weighed_by == "sum" and _has_num_items(batch) else 0.0

    def replica_loss(self, figures: Tensor) -> Tensor:
        """Return the loss of this replica's batch, from the sums of losses and weights."""
        return figures[0] / figures[1] if self._counts is None else self._counts.replica_loss

    @property
    def has_terms(self) -> bool:
        """True if the loss has several terms, which are counted before the first backward."""
        return self._counts is not None

    def differentiated(self, loss_sum: Tensor) -> Tensor:
        """Return the tensor that is differentiated; the optimizer multiplies the gradients by the rest."""
        assert self.divisor is not None
        return loss_sum / self.divisor

    def _weighed(self, loss: Tensor, outputs: Any, inputs: Any) -> "_Weighed":
        """Weigh a loss that comes without a weight."""
        observed = self._observed
        if self._reducer.reduction == "microbatch_mean":
            return _Weighed("mean", loss / len(self.microbatches), 1.0)
        exact = torch.promote_types(loss.dtype, torch.float32)
        if loss is _field(outputs, "loss") and observed is not None:
            if self._counts is not None:
                return self._weighed_by_terms(loss, self._counts, outputs, inputs)
            counted = observed.counted(loss)
            if counted is not None and counted.number is not None:
                return _Weighed("labels", loss.to(exact) * counted.number, counted.number)
            if counted is not None or self._adds_up(outputs, inputs):
                return _Weighed("sum", loss, 1 / self._reducer.mesh.size("dp"))
        elif observed is not None and self.compares:
            self._labels += [
                observed_loss.number
                for observed_loss in observed.losses[:1]
                if observed_loss.number is not None
            ]
        samples = float(batch_size(inputs))
        return _Weighed("samples", loss.to(exact) * samples, samples)

    def _weighed_by_terms(self, loss: Tensor, counts: GlobalCounts, outputs: Any, inputs: Any) -> "_Weighed":
        """Weigh every term of a loss by its share of the labels in the global batch."""
        assert self._observed is not None
        replicas, equal_share = self._reducer.mesh.size("dp"), 1 / len(self.microbatches)
        has_auxiliary = _has_auxiliary(outputs)
        total, fraction = counts.weighed(
            loss,
            terms_of(loss, self._observed.losses),
            index=self._index_of(inputs),
            samples=batch_size(inputs),
            rest=(equal_share / replicas, equal_share) if has_auxiliary else None,
        )
        self.deviation = counts.deviation
        if counts.weight is None:
            return _Weighed("sum", total, 1 / replicas)
        return _Weighed("labels", total * counts.weight, fraction * counts.weight)

    def _counts_of(self, loss: Tensor, outputs: Any, inputs: Any) -> GlobalCounts | None:
        """Count the terms of a loss in the global batch; None if it has only one, or some cannot be counted.

        Communicates over dp of last stages in compared calls, and in all calls of a loss of several terms.
        """
        terms = self._terms(loss, outputs, inputs)
        expected = expected_counts(terms, self.microbatches, self._index_of(inputs)) if terms else None
        if terms and expected is None:
            self._reducer.note(_BY_SAMPLES)
            terms = []
        agreed = self._reducer.agreed_terms(len(terms), self)
        if agreed is None:  # replicas have different terms
            self.deviation = 1.0
        if not agreed:
            return None
        if agreed == len(terms) and expected is not None:
            return GlobalCounts(
                terms,
                self.microbatches,
                expected,
                self._reducer.over_replicas,
                self._reducer.mesh.size("dp"),
            )
        self._reducer.over_replicas(GlobalCounts.none(agreed, loss.device))
        return None

    def _terms(self, loss: Tensor, outputs: Any, inputs: Any) -> list[Term]:
        """Return the terms of the model's loss if it has several, or one and a rest, and all can be counted."""
        observed, note = self._observed, self._reducer.note
        structure = self._reducer.structures.get(self.trains)
        set_structure = partial(self._reducer.set_structure, trains=self.trains)
        if loss is not _field(outputs, "loss") or observed is None or self._reducer.reduction != "global":
            set_structure("single")
            return []
        counted = observed.counted(loss)
        if counted is not None or self._adds_up(outputs, inputs):
            if counted is not None and not counted.of_batch:
                note(_BY_SAMPLES)
            set_structure("single")
            return []
        if structure == "single":
            set_structure("several")
            note(
                "the model's loss has more terms than in the calls before, so each microbatch of this call weighs as "
                "many as its samples"
            )
        if not observed.separate:
            note(_BY_SAMPLES)
            return []
        terms = terms_of(loss, observed.losses)
        # A sum that the model divides by a number of its own may be a mean over anything.
        sums_add_up = _has_num_items(inputs)
        is_countable = [
            sums_add_up if observed_loss.number is None else observed_loss.recount is not None
            for observed_loss, _ in terms
        ]
        if not terms or not all(is_countable):
            note(_BY_SAMPLES)
            set_structure("other")
            return []
        set_structure("several")
        if (
            structure is None
            and self.trains
            and not _has_auxiliary(outputs)
            and has_rest(loss, observed.losses)
        ):
            note(
                "the model's loss has an addend besides its means over labels, which weighs by samples; see "
                "docs/decisions/loss.md"
            )
        return terms

    def _adds_up(self, outputs: Any, inputs: Any) -> bool:
        """Return True for a loss of sums over a divisor that the batch has."""
        assert self._observed is not None
        has_sums = any(observed_loss.number is None for observed_loss in self._observed.losses)
        return has_sums and _has_num_items(inputs) and not _has_auxiliary(outputs)

    def _index_of(self, inputs: Any) -> int:
        return next(index for index, microbatch in enumerate(self.microbatches) if microbatch is inputs)

    @property
    def _observed(self) -> Observed | None:
        stage = self._reducer.stage
        return None if stage is None else stage.observed

    def note_uneven(self) -> None:
        """Log once if a criterion's mean is weighed by samples whose numbers of labels differ. Waits for the device."""
        if len(self._labels) > 1:
            samples = [batch_size(microbatch) for microbatch in self.microbatches]
            per_sample = {float(count) / size for count, size in zip(self._labels, samples, strict=False)}
            if len(per_sample) > 1:
                self._reducer.note(
                    "the criterion returns a mean, weighed by samples, but the microbatches have different numbers of "
                    "labels: return (loss_sum, weight) for the mean over all labels"
                )


def _has_auxiliary(outputs: Any) -> bool:
    """Return True for an auxiliary loss over all tokens; Switch's, beside a z-loss, is a mean over samples."""
    if _field(outputs, "encoder_z_loss") is not None:
        return False
    return any(_field(outputs, name) is not None for name in ("aux_loss", "encoder_aux_loss"))


def _has_num_items(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and inputs.get("num_items_in_batch") is not None


def require_num_items(batch: Any) -> None:
    """Raise ValueError for a `num_items_in_batch` that is no number above 0. It does not read a tensor on a device."""
    if not _has_num_items(batch):
        return
    number = batch["num_items_in_batch"]
    value = number
    if isinstance(number, Tensor):
        if number.ndim > 0:
            value = None
        elif number.is_cpu:
            value = number.item()
        else:
            value = 1  # reading it would wait for the device
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < inf:
        raise ValueError(
            f"num_items_in_batch={number!r} in the batch must be a number above 0, or a 0-d tensor: give the number "
            "of labels in the global batch, or leave it out"
        )


def _power_of_two(number: Tensor) -> Tensor:
    """Return the largest power of two up to a number, at least 1, without waiting for the device."""
    bits = number.float().abs().clamp_min(1).view(torch.int32)
    return (bits & 0x7F800000).view(torch.float32)


def set_gradient_factor(optimizer: ShardedOptimizer, factor: Tensor) -> None:
    """Give the optimizer the factor that corrects a batch's gradients, combined with those of accumulated batches."""
    previous = optimizer.gradient_factor
    if optimizer.accumulation_steps > 1 and isinstance(previous, Tensor):
        # Their weights add up, as of one larger batch: 1 / factor is proportional to the weight of a call.
        factor = _inverse(_inverse(previous) + _inverse(factor))
    optimizer.gradient_factor = factor


def _inverse(factor: Tensor) -> Tensor:
    """Return 1 / factor, and 0 for the factor 0 of a batch without labels."""
    return torch.where(factor != 0, 1 / factor, 0.0)
