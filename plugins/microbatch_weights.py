"""The weights of microbatches in the loss of their batch; see [Note: weights of microbatches] in loss_reducer.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cluster.collectives import all_reduce
from ..cluster.device import numbers_on
from ..pipeline.counted_loss import LossObserver
from ..pipeline.microbatch import batch_size, has_num_items
from ..pipeline.runner import Criterion, RunResult, loss_and_weight
from ..zero.optimizer import ShardedOptimizer
from .loss_reducer import (
    COUNTED,
    BatchLoss,
    LossFigures,
    LossReducer,
    WeightSource,
    power_of_two,
)
from .loss_terms import GlobalCounts, Term, expected_counts, has_rest, require_known_parameters, terms_of

_WEIGHED_BY_SAMPLES = (
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


class _WeightedLoss(NamedTuple):
    """The addend of a microbatch to the batch's loss sum, and its weight, a number or 0-d tensor."""

    weight_source: WeightSource
    loss_sum: Tensor
    weight: Any


@dataclass(frozen=True)
class Uncounted:
    """A criterion's result for a microbatch of copies that complete a batch: its loss has no gradient and no weight.

    The labels of a loss of several terms must be ignored ones there.

    Args:
        result: the loss, or (loss_sum, weight).
    """

    result: Any


class WeightedCriterion:
    """The criterion of one call; it returns (loss_sum, weight) of a microbatch, whatever the user's returns.

    The constructor also decides if the last stage keeps the terms of a loss separate in this call.

    Args:
        reducer: what earlier calls of the model left.
        criterion: the user's, or `model_loss`.
        microbatches: of this replica.
        optimizer: None in an evaluation.
        compares: the call is compared between ranks, so last stages may communicate.
        mean_samples: samples of a replica in the last compared call.

    Attributes:
        trains: True if gradients are enabled.
        divisor: a backward starts from loss_sum / divisor; None before the first microbatch.
        weight_source: of the last microbatch.
        deviation: above 0 if terms of the loss counted otherwise than expected, or differ between replicas.
    """

    def __init__(
        self,
        reducer: LossReducer,
        criterion: Criterion,
        microbatches: Sequence[Any],
        optimizer: ShardedOptimizer | None,
        *,
        compares: bool,
        mean_samples: float,
    ) -> None:
        self.criterion, self.microbatches = criterion, microbatches
        self.compares, self.mean_samples = compares and optimizer is not None, mean_samples
        self.weight_source: WeightSource = "samples"
        self.trains = torch.is_grad_enabled()
        is_accumulated = (
            optimizer is not None
            and optimizer.accumulation_steps > 1
            and isinstance(optimizer.gradient_factor, Tensor)
        )
        self.divisor = reducer.last_divisor if is_accumulated else None
        if reducer.stage is not None:
            structure = reducer.structures.get(self.trains)
            reducer.stage.separate = reducer.reduction == "global" and structure in (None, "several")
        self._reducer, self._has_begun = reducer, False
        # For `log_uneven_labels`: in compared calls, the labels of each microbatch that the model's own loss counted,
        # while the criterion returns another mean.
        self._labels: list[Tensor] = []
        self._counts: GlobalCounts | None = None  # of a loss of several terms
        self.deviation: Tensor | float = 0.0

    def __call__(self, outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of a microbatch's loss and its weight, a 0-d tensor.

        The first call also counts the terms of the loss and chooses the divisor: see `_global_counts` and
        `_choose_divisor`, which may communicate over dp of last stages.

        Raises:
            TypeError: the criterion returned a weight for some microbatches only.
            ValueError: the criterion trains a parameter that is not in the model.
        """
        returned: Any = self.criterion(outputs, inputs)
        is_counted = not isinstance(returned, Uncounted)
        loss, user_weight = loss_and_weight(returned if is_counted else returned.result)
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            stage = self._reducer.stage
            if self.trains and stage is not None and loss is not _field(outputs, "loss"):
                require_known_parameters(loss, outputs, stage.model)
            self._counts = self._global_counts(loss, outputs, inputs)
        if user_weight is None:
            weighted = self._with_weight(loss, outputs, inputs)
        else:
            weighted = _WeightedLoss("criterion", loss, user_weight)
        if not is_first and (weighted.weight_source == "criterion") != (self.weight_source == "criterion"):
            raise TypeError(
                "the criterion returned a weight for some microbatches only: return one for all or none"
            )
        self.weight_source, loss_sum, weight = weighted
        if not isinstance(weight, Tensor):  # a kernel that fills: a copy would block the host
            weight = torch.full((), float(weight), dtype=torch.float64, device=loss.device)
        weight = weight.to(loss.device)
        if self.weight_source in ("mean", "sum") and not is_first:
            weight = torch.zeros_like(weight)  # the first microbatch has the weight of all
        if is_first and self.divisor is None:
            self.divisor = self._choose_divisor(weight.detach())
        observed = self._observed
        if (
            observed is not None
            and observed.has_only_added_graphs
            and not has_rest(loss_sum, observed.losses)
        ):
            loss_sum = loss_sum.detach()  # the graph of its terms alone, which trains nothing
        return (loss_sum, weight) if is_counted else self._uncounted(loss_sum, weight)

    def _uncounted(self, loss_sum: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss sum and weight of a microbatch that counts nothing.

        Terms of a loss weigh by what they counted in the global batch, which is 0 here, else it is a deviation.
        """
        if self._counts is not None:
            assert self._observed is not None
            means = [record.denominator for record in self._observed.losses if record.denominator is not None]
            self.deviation = self.deviation + sum(means)
            return loss_sum, weight
        return loss_sum * 0, weight if self.weight_source in ("mean", "sum") else weight * 0

    @property
    def kind(self) -> float | Tensor:
        """A number that must be equal on all replicas, else their losses cannot be added.

        -1 for a criterion's weights, `num_items_in_batch` for a sum that is divided by it, 0 for every other loss.
        """
        if self.weight_source == "criterion":
            return -1.0
        batch = self.microbatches[0]
        return batch["num_items_in_batch"] if self.weight_source == "sum" and has_num_items(batch) else 0.0

    def reduced(self, result: RunResult, accumulation_steps: int) -> BatchLoss:
        """Return the loss of the batch. All-reduce over the world if there are stages or replicas.

        Args:
            result: the losses and weights of the microbatches, on the rank of the last stage.
            accumulation_steps: calls whose mean the optimizer's step uses.
        """
        return self._reducer.reduced(
            self._figures(result) if self._reducer.adds_losses else None,
            trains=self.trains,
            weight_source=self.weight_source,
            accumulation_steps=accumulation_steps,
        )

    def _figures(self, result: RunResult) -> LossFigures:
        """Return the sums over the microbatches of this replica, in float32."""
        assert result.weights is not None and self.divisor is not None
        loss_sum = torch.stack([loss.float() for loss in result.losses]).sum()
        weight = torch.stack([weight.float() for weight in result.weights]).sum()
        return LossFigures(
            loss_sum=loss_sum,
            weight=weight,
            divisor=self.divisor,
            kind=self.kind,
            deviation=self.deviation,
            replica_loss=loss_sum / weight if self._counts is None else self._counts.replica_loss,
        )

    def _choose_divisor(self, weight: Tensor) -> Tensor:
        """Return the divisor of this call, equal on all replicas; see [Note: weights of microbatches].

        If the loss counts something (labels), it is the one that the last call left. Before the first call it is
        estimated from the weight of the first microbatch, or from samples if replicas cannot compare the estimate. If
        the loss is a sum or one mean, it is 1. All-reduce over dp of last stages in compared calls.

        Args:
            weight: of the first microbatch, 0-d.
        """
        mesh, divisors = self._reducer.mesh, self._reducer.divisors
        num_replicas, is_counted = mesh.size("dp"), self.weight_source in COUNTED
        if not self.trains:
            return torch.ones((), device=mesh.device)
        # For a sum or a mean the divisor is 1, to which an estimate of 0 is rounded.
        estimate = weight.float() * (len(self.microbatches) if is_counted else 0)
        if self.compares and num_replicas > 1:  # in every case, since all replicas must communicate alike
            estimate = all_reduce(estimate, mesh.group("dp")) / num_replicas
        if self.weight_source in divisors:
            return divisors[self.weight_source]
        is_estimate_equal = self.compares or num_replicas == 1  # on all replicas
        if self.weight_source == "samples" or (is_counted and not is_estimate_equal):
            (estimate,) = numbers_on(mesh.device, [self.mean_samples], torch.float32)
        divisor = power_of_two(estimate)
        if is_counted:
            divisors[self.weight_source] = divisor
        return divisor

    @property
    def has_terms(self) -> bool:
        """True if the loss has several terms, which are counted before the first backward."""
        return self._counts is not None

    def differentiated(self, loss_sum: Tensor) -> Tensor:
        """Return the tensor from which backward starts, loss_sum / divisor."""
        assert self.divisor is not None
        return loss_sum / self.divisor

    def _with_weight(self, loss: Tensor, outputs: Any, inputs: Any) -> "_WeightedLoss":
        """Return a microbatch's loss with the weight that it has by the table in docs/decisions/loss.md.

        For the model's own loss, that is what its loss functions counted; for any other, its samples.

        Args:
            loss: the criterion's, which returned no weight.
            outputs, inputs: the model's outputs and the microbatch, as the criterion got them.
        """
        observed = self._observed
        if self._reducer.reduction == "microbatch_mean":
            return _WeightedLoss("mean", loss / len(self.microbatches), 1.0)
        exact = torch.promote_types(loss.dtype, torch.float32)
        if loss is _field(outputs, "loss") and observed is not None:
            if self._counts is not None:
                return self._weighted_by_terms(loss, self._counts, outputs, inputs)
            record = observed.record_of(loss)
            if record is not None and record.denominator is not None:
                return _WeightedLoss("labels", loss.to(exact) * record.denominator, record.denominator)
            if record is not None or self._is_sum_over_num_items(outputs, inputs):
                return _WeightedLoss("sum", loss, 1 / self._reducer.mesh.size("dp"))
        elif observed is not None and self.compares:
            self._labels += [
                first.denominator for first in observed.losses[:1] if first.denominator is not None
            ]
        samples = float(batch_size(inputs))
        return _WeightedLoss("samples", loss.to(exact) * samples, samples)

    def _weighted_by_terms(
        self, loss: Tensor, counts: GlobalCounts, outputs: Any, inputs: Any
    ) -> "_WeightedLoss":
        """Weigh every term of a loss by its fraction of the labels in the global batch; see [Note: several terms]."""
        assert self._observed is not None
        replicas, equal_share = self._reducer.mesh.size("dp"), 1 / len(self.microbatches)
        has_auxiliary = _has_auxiliary(outputs)
        addend, fraction = counts.weighted_loss(
            loss,
            terms_of(loss, self._observed.losses),
            index=self._index_of(inputs),
            samples=batch_size(inputs),
            rest=(equal_share / replicas, equal_share) if has_auxiliary else None,
        )
        self.deviation = counts.deviation
        if counts.weight is None:
            return _WeightedLoss("sum", addend, 1 / replicas)
        return _WeightedLoss("labels", addend * counts.weight, fraction * counts.weight)

    def _global_counts(self, loss: Tensor, outputs: Any, inputs: Any) -> GlobalCounts | None:
        """Count the labels of every term of a loss in the global batch; None if it is not weighed by terms.

        Sets `deviation` if replicas have different terms. All-reduces over dp of last stages in compared calls, and
        in all calls of a loss of several terms.
        """
        terms = self._countable_terms(loss, outputs, inputs)
        expected = expected_counts(terms, self.microbatches, self._index_of(inputs)) if terms else None
        if terms and expected is None:
            self._reducer.log_once(_WEIGHED_BY_SAMPLES)
            terms = []
        agreed = self._reducer.agreed_num_terms(len(terms), trains=self.trains, compares=self.compares)
        if agreed is None:  # replicas have different terms
            self.deviation = 1.0
        if not agreed:
            return None
        if agreed == len(terms) and expected is not None:
            return GlobalCounts(
                terms,
                self.microbatches,
                expected,
                self._reducer.sum_over_replicas,
                self._reducer.mesh.size("dp"),
            )
        self._reducer.sum_over_replicas(GlobalCounts.none(agreed, loss.device))
        return None

    def _countable_terms(self, loss: Tensor, outputs: Any, inputs: Any) -> list[Term]:
        """Return the terms of the model's loss if it has several, or one and a rest, and all can be counted.

        Otherwise return none. Keeps the structure for later calls, and logs once why a loss weighs by samples.
        """
        observed, log_once = self._observed, self._reducer.log_once
        structure = self._reducer.structures.get(self.trains)
        set_structure = partial(self._reducer.set_structure, trains=self.trains)
        if observed is None or self._is_single(loss, outputs, inputs):
            set_structure("single")
            return []
        if structure == "single":  # of earlier calls, so that this call's terms are not separate
            set_structure("several")
            log_once(
                "the model's loss has more terms than in the calls before, so each microbatch of this call weighs as "
                "many as its samples"
            )
        if not observed.separate:
            log_once(_WEIGHED_BY_SAMPLES)
            return []
        terms = terms_of(loss, observed.losses)
        # A sum that the model divides by a number of its own may be a mean over anything.
        sums_add_up = has_num_items(inputs)
        is_countable = [
            sums_add_up if record.denominator is None else record.recount is not None for record, _ in terms
        ]
        if not terms or not all(is_countable):
            log_once(_WEIGHED_BY_SAMPLES)
            set_structure("other")
            return []
        set_structure("several")
        if (
            structure is None
            and self.trains
            and not _has_auxiliary(outputs)
            and has_rest(loss, observed.losses)
        ):
            log_once(
                "the model's loss has an addend besides its means over labels, which weighs by samples; see "
                "docs/decisions/loss.md"
            )
        return terms

    def _is_single(self, loss: Tensor, outputs: Any, inputs: Any) -> bool:
        """Return True for a loss without terms: a criterion's own, one loss function's result, or sums that add up."""
        if loss is not _field(outputs, "loss") or self._reducer.reduction != "global":
            return True
        assert self._observed is not None
        record = self._observed.record_of(loss)
        if record is not None and not record.depends_on_batch:
            self._reducer.log_once(_WEIGHED_BY_SAMPLES)
        return record is not None or self._is_sum_over_num_items(outputs, inputs)

    def _is_sum_over_num_items(self, outputs: Any, inputs: Any) -> bool:
        """Return True if the model divides sums by the batch's `num_items_in_batch`, so that microbatches add up."""
        assert self._observed is not None
        has_sums = any(record.denominator is None for record in self._observed.losses)
        return has_sums and has_num_items(inputs) and not _has_auxiliary(outputs)

    def _index_of(self, inputs: Any) -> int:
        return next(index for index, microbatch in enumerate(self.microbatches) if microbatch is inputs)

    @property
    def _observed(self) -> LossObserver | None:
        stage = self._reducer.stage
        return None if stage is None else stage.observed

    def log_uneven_labels(self) -> None:
        """Log once if a criterion's mean weighs by samples, but microbatches have different numbers of labels.

        Waits for the device.
        """
        if len(self._labels) > 1:
            samples = [batch_size(microbatch) for microbatch in self.microbatches]
            per_sample = {float(count) / size for count, size in zip(self._labels, samples, strict=False)}
            if len(per_sample) > 1:
                self._reducer.log_once(
                    "the criterion returns a mean, weighed by samples, but the microbatches have different numbers of "
                    "labels: return (loss_sum, weight) for the mean over all labels"
                )


def _has_auxiliary(outputs: Any) -> bool:
    """Return True for outputs with a mixture's auxiliary loss over all tokens; Switch's is a mean over samples."""
    if _field(outputs, "encoder_z_loss") is not None:  # Switch
        return False
    return any(_field(outputs, name) is not None for name in ("aux_loss", "encoder_aux_loss"))
