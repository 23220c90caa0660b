"""Losses of several terms: each term weighs by what it counted in the global batch.

[Note: several terms] The loss of a microbatch is Σ cᵢ·tᵢ + rest, where a term tᵢ is the mean over nᵢ labels. That of
the global batch is Σ cᵢ·(Σ nᵢ·tᵢ) / (Σ nᵢ) + mean of the rest, so the sums Σ nᵢ must be known before the first
backward. In the first microbatch the labels of the others are counted by the recorded functions, and replicas add up
their counts. The coefficients cᵢ come from the graph between terms and loss. Everything stays on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        terms = [each.term for each in losses]
        if not terms or loss.grad_fn is None:
            return []
        slopes = torch.autograd.grad(loss, terms, create_graph=True, allow_unused=True)
        curved = [each for each in slopes if each is not None and each.requires_grad]
        if curved and any(
            each is not None
            for each in torch.autograd.grad(curved, terms, retain_graph=True, allow_unused=True)
        ):
            return []
    pairs = zip(losses, slopes, strict=True)
    return [Term(counted, slope) for counted, slope in pairs if slope is not None]


def has_rest(loss: Tensor, losses: Sequence[Counted]) -> bool:
    """Return True if a parameter has a gradient of a loss that is not one of its terms."""
    within = {each.term.grad_fn for each in losses if each.term.grad_fn is not None}
    leaves = {id(each.term) for each in losses if not each.has_graph}
    seen, reached = set(), [loss.grad_fn]
    while reached:
        node = reached.pop()
        if node is None or node in seen or node in within:
            continue
        seen.add(node)
        variable: Any = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            return True
        reached += [inner for inner, _ in node.next_functions]
    return False


class GlobalCounts:
    """The counts of a loss of several terms in a global batch, from the first microbatch that runs.

    Args:
        terms: of that microbatch, each with a `recount` or a sum.
        microbatches: of this replica.
        first: the index of that microbatch.
        over_replicas: sums a tensor over replicas.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        microbatches: Sequence[Any],
        first: int,
        over_replicas: Callable[[Tensor], Tensor],
    ) -> None:
        device = terms[0].counted.term.device
        rows = [
            list(_counts(terms, None if index == first else OfMicrobatch(each)))
            for index, each in enumerate(microbatches)
        ]
        self.expected_MT = torch.stack([torch.stack(row) for row in rows])
        samples = torch.full((1,), sum(map(batch_size, microbatches)), dtype=torch.float64, device=device)
        *totals, self.samples = over_replicas(torch.cat([self.expected_MT.sum(0), samples])).unbind()
        self.totals = totals
        self.deviation = torch.zeros((), device=device)  # microbatches that counted otherwise than expected
        main = next((total for total, term in zip(totals, terms, strict=True) if _is_mean(term)), None)
        # The weight of the batch beside others of a step: of its first term that counts.
        self.weight = None if main is None else torch.where(main > 0, main, self.samples)

    def weighed(
        self, loss: Tensor, terms: Sequence[Term], *, index: int, samples: int, rest: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's addend to the loss of the global batch, and its fraction of the samples.

        Args:
            loss: of the microbatch.
            terms: of this loss.
            index: of the microbatch.
            samples: of the microbatch.
            rest: the weight of the rest; None weighs it by samples.
        """
        exact = torch.promote_types(loss.dtype, torch.float32)
        fraction = samples / self.samples
        weight: Any = fraction if rest is None else rest
        total = loss.to(exact) * weight
        for term, count in zip(terms, self.totals, strict=True):
            number, ratio = term.counted.number, 1.0 - weight
            if number is not None:
                ratio = number / torch.where(count > 0, count, 1) - weight
                total = total + torch.where(count > 0, 0.0, torch.nan)  # as in one process; no gradient
            total = total + (term.coefficient * term.counted.term).to(exact) * ratio
        self.deviation += (torch.stack(list(_counts(terms, None))) != self.expected_MT[index]).any()
        return total, fraction


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
