"""Losses of several terms: each term weighs by what it counted in the global batch.

[Note: several terms] The loss of a microbatch is Σ cᵢ·tᵢ + rest, where a term tᵢ is the mean over nᵢ labels. That of
the global batch is Σ cᵢ·(Σ nᵢ·tᵢ) / (Σ nᵢ) + mean of the rest, so the sums Σ nᵢ must be known before the first
backward. In the first microbatch the labels of the others are counted by the recorded functions, and replicas add up
their counts. The coefficients cᵢ come from the graph between terms and loss. Everything stays on the device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..pipeline.counted_loss import CountedLoss
from ..pipeline.label_functions import LabelEvaluator
from ..pipeline.microbatch import batch_size


class Term(NamedTuple):
    """A term of a loss, and the loss's derivative by it."""

    counted: CountedLoss
    coefficient: Tensor


def terms_of(loss: Tensor, losses: Sequence[CountedLoss]) -> list[Term]:
    """Return the terms of which a loss is a linear combination plus a rest; none if it is not linear in them.

    Args:
        loss: with the graph that leads to the terms.
        losses: recorded separately, see [Note: separate terms].
    """
    with torch.inference_mode(False):  # enables gradients
        terms = [record.term for record in losses]
        if not terms or loss.grad_fn is None:
            return []
        derivatives = torch.autograd.grad(loss, terms, create_graph=True, allow_unused=True)
        not_constant = [
            derivative for derivative in derivatives if derivative is not None and derivative.requires_grad
        ]
        if not_constant:
            second = torch.autograd.grad(not_constant, terms, retain_graph=True, allow_unused=True)
            if any(derivative is not None for derivative in second):
                return []
    pairs = zip(losses, derivatives, strict=True)
    return [Term(record, derivative) for record, derivative in pairs if derivative is not None]


def has_rest(loss: Tensor, losses: Sequence[CountedLoss]) -> bool:
    """Return True if a loss also depends on parameters other than through its terms: a penalty on weights.

    Args:
        loss: with the graph that leads to the terms.
        losses: the recorded terms.
    """
    terms_without_graph = {id(record.term) for record in losses if not record.has_graph}
    leaves = leaves_bypassing(loss, [record.term for record in losses])
    return any(id(leaf) not in terms_without_graph for leaf in leaves)


def leaves_bypassing(loss: Tensor, intermediates: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of a loss's graph that are reached without passing through one of these tensors."""
    boundary = {tensor.grad_fn for tensor in intermediates if tensor.grad_fn is not None}
    visited, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in visited or node in boundary:
            continue
        visited.add(node)
        leaf: Any = getattr(node, "variable", None)  # of an AccumulateGrad node
        if leaf is not None:
            yield leaf
        stack += [next_node for next_node, _ in node.next_functions]


def require_known_parameters(loss: Tensor, outputs: Any, model: nn.Module) -> None:
    """Raise ValueError if a criterion trains a parameter that is not in the model: nothing would correct its gradient.

    Args:
        loss: of the criterion.
        outputs: of the model.
        model: the boosted model.
    """
    output_tensors = [output for output in tree_leaves(outputs) if isinstance(output, Tensor)]
    trained = [leaf for leaf in leaves_bypassing(loss, output_tensors) if isinstance(leaf, nn.Parameter)]
    in_model = {id(parameter) for parameter in model.parameters()} if trained else set()
    for leaf in trained:
        if id(leaf) not in in_model:
            raise ValueError(
                f"the criterion trains a parameter of shape {tuple(leaf.shape)} that is not in the model: add it to "
                "the model before boost, or detach it"
            )


class GlobalCounts:
    """The counts of every term of a loss in the global batch; see [Note: several terms].

    Made in the first microbatch of a call. The constructor sums counts over replicas by `sum_over_replicas`.

    Attributes:
        deviation: 0-d, above 0 if a microbatch counted otherwise than expected, a replica's loss has no such terms, or
            coefficients differ between microbatches or replicas. Every microbatch adds to it.
        replica_loss: 0-d, the loss of this replica's batch so far.
        weight: 0-d, the weight of the batch beside others of a step; None for a loss of sums.

    Args:
        terms: of that microbatch, each with a `recount` or a sum.
        microbatches: of this replica.
        expected_MT: the count of each term T in each microbatch M, see `expected_counts`.
        sum_over_replicas: sums a tensor over replicas.
        num_replicas: the number of replicas.
    """

    @staticmethod
    def none(num_terms: int, device: torch.device) -> Tensor:
        """Return the addend of a replica whose loss has no such terms to the sum over replicas in `__init__`."""
        return torch.zeros(3 * num_terms + 2, dtype=torch.float64, device=device)

    def __init__(
        self,
        terms: Sequence[Term],
        microbatches: Sequence[Any],
        expected_MT: Tensor,
        sum_over_replicas: Callable[[Tensor], Tensor],
        num_replicas: int,
    ) -> None:
        device = terms[0].counted.term.device
        self._expected_MT = expected_MT
        self._coefficients = _coefficients(terms)
        samples = torch.full((1,), sum(map(batch_size, microbatches)), dtype=torch.float64, device=device)
        # The counts of all terms, then of samples.
        self._replica_counts = torch.cat([self._expected_MT.sum(0), samples])
        # Summed over replicas; the ones give the number of replicas whose loss has such terms.
        addends = [self._replica_counts, torch.ones_like(samples), self._coefficients, self._coefficients**2]
        totals = sum_over_replicas(torch.cat(addends)).split([len(addend) for addend in addends])
        self._global_counts, num_sharing, sums, squares = totals
        # Coefficients are equal on all replicas if their variance is 0, up to rounding.
        have_variance = (squares * num_replicas - sums**2).abs() > 1e-9 * sums**2
        self.deviation = (num_sharing != num_replicas).any().float() + have_variance.any()
        self.replica_loss = torch.zeros((), dtype=torch.float64, device=device)
        *term_counts, global_samples = self._global_counts.unbind()
        counts = zip(term_counts, terms, strict=True)
        # The count of the first term that is a mean.
        count = next((count for count, term in counts if _is_mean(term)), None)
        self.weight = None if count is None else torch.where(count > 0, count, global_samples)

    def weighted_loss(
        self,
        loss: Tensor,
        terms: Sequence[Term],
        *,
        index: int,
        samples: int,
        rest: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's addend to the loss of the global batch, and its fraction of the batch's samples.

        Adds to `replica_loss` and `deviation`.

        Args:
            loss: of the microbatch, 0-d.
            terms: of this loss.
            index: of the microbatch in the call.
            samples: the number of samples in the microbatch.
            rest: the weights, in the global batch and in the replica's, of the part of the loss that is in no term;
                None weighs it by samples.

        Raises:
            ValueError: the loss has another number of terms than in the first microbatch.
        """
        if len(terms) != self._expected_MT.shape[1]:
            raise ValueError(
                f"the model's loss has {len(terms)} terms in one microbatch and {self._expected_MT.shape[1]} in the "
                "first: give a criterion that returns (loss_sum, weight)"
            )
        fraction, replica_fraction = samples / self._global_counts[-1], samples / self._replica_counts[-1]
        rest_weight, replica_rest_weight = (fraction, replica_fraction) if rest is None else rest
        addend = _addend(loss, terms, self._global_counts, rest_weight)
        with torch.no_grad():
            self.replica_loss += _addend(loss, terms, self._replica_counts, replica_rest_weight)
        counts_T = torch.stack(list(_counts(terms, None)))
        self.deviation += (counts_T != self._expected_MT[index]).any()
        self.deviation += (_coefficients(terms) != self._coefficients).any()
        return addend, fraction


def _addend(loss: Tensor, terms: Sequence[Term], batch_counts: Tensor, rest_weight: Any) -> Tensor:
    """Return the addend of a microbatch to the loss of a batch, 0-d.

    The microbatch's loss is Σ cᵢ·tᵢ + rest: all of it gets the rest's weight, then each term the difference to its own.

    Args:
        loss: of the microbatch.
        terms: of this loss.
        batch_counts: the count of each term in the batch, then of samples.
        rest_weight: a number or 0-d tensor.
    """
    exact = torch.promote_types(loss.dtype, torch.float32)
    addend = loss.to(exact) * rest_weight
    for (counted, coefficient), count in zip(terms, batch_counts, strict=False):  # without the samples
        weight: Any = 1.0
        if counted.denominator is not None:
            weight = counted.denominator / torch.where(count > 0, count, 1)
            addend = addend + torch.where(count > 0, 0.0, torch.nan)  # as in one process; no gradient
        addend = addend + (coefficient * counted.term).to(exact) * (weight - rest_weight)
    return addend


def expected_counts(terms: Sequence[Term], microbatches: Sequence[Any], recorded: int) -> Tensor | None:
    """Return (M, T): the count of each term T in each microbatch M, before those other than the first run.

    None if the recorded functions of labels do not apply to microbatches of other sizes.

    Args:
        terms: of the microbatch that ran.
        microbatches: of this replica.
        recorded: the index of the microbatch that ran.
    """
    try:
        rows = [
            torch.stack(list(_counts(terms, None if index == recorded else LabelEvaluator(microbatch))))
            for index, microbatch in enumerate(microbatches)
        ]
    except (IndexError, RuntimeError, ValueError):  # one term for each sample, a fixed size
        return None
    return torch.stack(rows)


def _coefficients(terms: Sequence[Term]) -> Tensor:
    return torch.stack([coefficient.detach().double() for _, coefficient in terms])


def _is_mean(term: Term) -> bool:
    return term.counted.denominator is not None


def _counts(terms: Sequence[Term], microbatch: LabelEvaluator | None) -> Iterator[Tensor]:
    """Yield the count of each term, 0-d float64; 0 for a sum.

    Args:
        terms: of the microbatch that ran.
        microbatch: another one, whose labels are counted; None for the one that ran.
    """
    for counted, _ in terms:
        if counted.denominator is None:
            yield torch.zeros((), dtype=torch.float64, device=counted.term.device)
        elif microbatch is None:
            yield counted.denominator.double()
        else:
            assert counted.recount is not None
            yield counted.recount(microbatch).double()
