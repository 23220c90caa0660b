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

from ..pipeline.counted_loss import Counted
from ..pipeline.label_functions import OfMicrobatch
from ..pipeline.microbatch import batch_size


class Term(NamedTuple):
    """A term of a loss, and the loss's derivative by it."""

    counted: Counted
    coefficient: Tensor


def terms_of(loss: Tensor, losses: Sequence[Counted]) -> list[Term]:
    """Return the terms whose linear combination is a loss, but for a rest; none if it is not linear in them."""
    with torch.inference_mode(False):  # enables gradients
        terms = [counted.term for counted in losses]
        if not terms or loss.grad_fn is None:
            return []
        slopes = torch.autograd.grad(loss, terms, create_graph=True, allow_unused=True)
        variable = [slope for slope in slopes if slope is not None and slope.requires_grad]
        if variable:
            curvatures = torch.autograd.grad(variable, terms, retain_graph=True, allow_unused=True)
            if any(curvature is not None for curvature in curvatures):
                return []
    pairs = zip(losses, slopes, strict=True)
    return [Term(counted, slope) for counted, slope in pairs if slope is not None]


def has_rest(loss: Tensor, losses: Sequence[Counted]) -> bool:
    """Return True if a parameter has a gradient of a loss that is not one of its terms."""
    leaves = {id(counted.term) for counted in losses if not counted.has_graph}
    return any(id(leaf) not in leaves for leaf in leaves_of(loss, [counted.term for counted in losses]))


def leaves_of(loss: Tensor, inner: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that have a gradient of a loss other than through these inner tensors."""
    within = {tensor.grad_fn for tensor in inner if tensor.grad_fn is not None}
    seen, reached = set(), [loss.grad_fn]
    while reached:
        node = reached.pop()
        if node is None or node in seen or node in within:
            continue
        seen.add(node)
        variable: Any = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        reached += [before for before, _ in node.next_functions]


def require_known_parameters(loss: Tensor, outputs: Any, model: nn.Module) -> None:
    """Raise ValueError if a criterion trains a parameter that is not in the model: nothing would correct its gradient.

    Args:
        loss: of the criterion.
        outputs: of the model.
        model: the boosted model.
    """
    computed = [output for output in tree_leaves(outputs) if isinstance(output, Tensor)]
    trained = [leaf for leaf in leaves_of(loss, computed) if isinstance(leaf, nn.Parameter)]
    known = {id(parameter) for parameter in model.parameters()} if trained else set()
    for leaf in trained:
        if id(leaf) not in known:
            raise ValueError(
                f"the criterion trains a parameter of shape {tuple(leaf.shape)} that is not in the model: add it to "
                "the model before boost, or detach it"
            )


class GlobalCounts:
    """The counts of a loss of several terms in a global batch, from the first microbatch that runs.

    Args:
        terms: of that microbatch, each with a `recount` or a sum.
        microbatches: of this replica.
        expected_MT: the count of each term T in each microbatch M, see `expected_counts`.
        over_replicas: sums a tensor over replicas.
        num_replicas: the number of replicas.
    """

    @staticmethod
    def none(num_terms: int, device: torch.device) -> Tensor:
        """Return the numbers of a replica whose loss has no such terms, for the sum over replicas."""
        return torch.zeros(3 * num_terms + 2, dtype=torch.float64, device=device)

    def __init__(
        self,
        terms: Sequence[Term],
        microbatches: Sequence[Any],
        expected_MT: Tensor,
        over_replicas: Callable[[Tensor], Tensor],
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
        totals = over_replicas(torch.cat(addends)).split([len(addend) for addend in addends])
        self._global_counts, num_sharing, sums, squares = totals
        differ = (squares * num_replicas - sums**2).abs() > 1e-9 * sums**2  # equal numbers have no variance
        # Above 0 if microbatches counted otherwise than expected, a replica's loss has no such terms, or a coefficient
        # is not that of the other microbatches or replicas.
        self.deviation = (num_sharing != num_replicas).any().float() + differ.any()
        self.replica_loss = torch.zeros((), dtype=torch.float64, device=device)
        *term_counts, global_samples = self._global_counts.unbind()
        counts = zip(term_counts, terms, strict=True)
        # The weight of the batch beside others of a step: the count of its first term that is a mean.
        count = next((count for count, term in counts if _is_mean(term)), None)
        self.weight = None if count is None else torch.where(count > 0, count, global_samples)

    def weighed(
        self,
        loss: Tensor,
        terms: Sequence[Term],
        *,
        index: int,
        samples: int,
        rest: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's addend to the loss of the global batch, and its fraction of the samples.

        Args:
            loss: of the microbatch.
            terms: of this loss.
            index: of the microbatch.
            samples: of the microbatch.
            rest: the weights of the rest in the global batch and in the replica's; None weighs it by samples.

        Raises:
            ValueError: the loss has another number of terms than in the first microbatch.
        """
        if len(terms) != self._expected_MT.shape[1]:
            raise ValueError(
                f"the model's loss has {len(terms)} terms in one microbatch and {self._expected_MT.shape[1]} in the "
                "first: give a criterion that returns (loss_sum, weight)"
            )
        fraction, replica_fraction = (
            samples / counts[-1] for counts in (self._global_counts, self._replica_counts)
        )
        rest_weight, replica_rest_weight = (fraction, replica_fraction) if rest is None else rest
        addend = _addend(loss, terms, self._global_counts, rest_weight)
        with torch.no_grad():
            self.replica_loss += _addend(loss, terms, self._replica_counts, replica_rest_weight)
        self.deviation += (torch.stack(list(_counts(terms, None))) != self._expected_MT[index]).any()
        self.deviation += (_coefficients(terms) != self._coefficients).any()
        return addend, fraction


def _addend(loss: Tensor, terms: Sequence[Term], batch_counts: Tensor, rest_weight: Any) -> Tensor:
    """Return the addend of a microbatch to the loss of a batch with these counts.

    The microbatch's loss is Σ cᵢ·tᵢ + rest: all of it gets the rest's weight, then each term the difference to its own.
    """
    exact = torch.promote_types(loss.dtype, torch.float32)
    addend = loss.to(exact) * rest_weight
    for (counted, coefficient), count in zip(terms, batch_counts, strict=False):  # without the samples
        weight: Any = 1.0
        if counted.number is not None:
            weight = counted.number / torch.where(count > 0, count, 1)
            addend = addend + torch.where(count > 0, 0.0, torch.nan)  # as in one process; no gradient
        addend = addend + (coefficient * counted.term).to(exact) * (weight - rest_weight)
    return addend


def expected_counts(terms: Sequence[Term], microbatches: Sequence[Any], recorded: int) -> Tensor | None:
    """Return (M, T): what each term counts in each microbatch; None if the functions fit one microbatch alone.

    Args:
        terms: of the recorded microbatch.
        microbatches: of this replica.
        recorded: its index.
    """
    try:
        rows = [
            torch.stack(list(_counts(terms, None if index == recorded else OfMicrobatch(microbatch))))
            for index, microbatch in enumerate(microbatches)
        ]
    except (IndexError, RuntimeError, ValueError):  # one term for each sample, a fixed size
        return None
    return torch.stack(rows)


def _coefficients(terms: Sequence[Term]) -> Tensor:
    return torch.stack([coefficient.detach().double() for _, coefficient in terms])


def _is_mean(term: Term) -> bool:
    return term.counted.number is not None


def _counts(terms: Sequence[Term], microbatch: OfMicrobatch | None) -> Iterator[Tensor]:
    """Yield what each term counts in another microbatch, or counted in its own; 0 for a sum."""
    for counted, _ in terms:
        if counted.number is None:
            yield torch.zeros((), dtype=torch.float64, device=counted.term.device)
        elif microbatch is None:
            yield counted.number.double()
        else:
            assert counted.recount is not None
            yield counted.recount(microbatch).double()
