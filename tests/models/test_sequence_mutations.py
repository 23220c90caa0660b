"""Rows of spread sequences fail when a mechanism that they rest on is broken on purpose."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.nn.functional as F
from torch import Tensor

from echelon.shardformer import layer_split
from echelon.shardformer.sequence import boundary, loss
from echelon.shardformer.sequence.axis import SequenceAxis
from echelon.shardformer.sequence.before_layers import PartsAlone
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ..pool import Pool
from .test_mutations import departure_with

LLAMA, GPT2, BERT = (ModelChoice(model_type=name) for name in ("llama", "gpt2", "bert"))


def sums_of_norms_are_forgotten() -> AbstractContextManager:
    return patch.object(layer_split, "parameters_of_parts", lambda table, layer: [])


def a_part_counts_once() -> AbstractContextManager:
    """[Note: gradients over the sequence axis], behind the last layer."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.own(gradient, 1), None, None, None

    return patch.object(boundary._Gather, "backward", staticmethod(backward))


def a_share_counts_once() -> AbstractContextManager:
    """The same, where the loss is computed on parts."""
    return patch.object(loss._SumOfShares, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


@contextmanager
def the_first_ranks_part(*, of_positions: bool) -> Iterator[None]:
    """In front of the layers, of positions or of tokens."""
    own = PartsAlone._own

    def first(self: PartsAlone, whole: Tensor) -> Tensor:
        assert self._given is not None
        is_meant = ("position_ids" in self._given[1]) == of_positions
        return self._axis.order.own(whole, -1, 0) if is_meant else own(self, whole)

    with patch.object(PartsAlone, "_own", first):
        yield


def positions_are_those_of_the_first_rank() -> AbstractContextManager:
    return the_first_ranks_part(of_positions=True)


def tokens_are_those_of_the_first_rank() -> AbstractContextManager:
    return the_first_ranks_part(of_positions=False)


@contextmanager
def labels_are_cut_before_they_are_shifted() -> Iterator[None]:
    own = SequenceAxis.own

    def late(self: SequenceAxis, x: Tensor, dim: int, *, padding: int = 0) -> Tensor:
        if padding != -100:
            return own(self, x, dim, padding=padding)
        unshifted = F.pad(x, (1, 0), value=padding)[..., :-1]
        cut = own(self, unshifted, dim, padding=padding)
        return F.pad(cut, (0, 1), value=padding)[..., 1:].contiguous()

    with patch.object(SequenceAxis, "own", late):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "choice", "layout"),
    [
        (sums_of_norms_are_forgotten, LLAMA, Layout(tp=2, sequence="split_gather")),
        (sums_of_norms_are_forgotten, BERT, Layout(tp=2, sequence="ring")),
        (a_part_counts_once, GPT2, Layout(sp=2, sequence="all_to_all")),
        (a_share_counts_once, LLAMA, Layout(sp=2, sequence="ring_attn")),
        (positions_are_those_of_the_first_rank, LLAMA, Layout(sp=2, sequence="all_to_all")),
        (tokens_are_those_of_the_first_rank, LLAMA, Layout(sp=2, sequence="ring_attn")),
        (labels_are_cut_before_they_are_shifted, LLAMA, Layout(sp=2, sequence="all_to_all")),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "model_type", None) or str(value),
)
def test_a_broken_mechanism_is_found(
    pool: Pool, broken: Callable[[], AbstractContextManager], choice: ModelChoice, layout: Layout
) -> None:
    departures = pool.run(layout.world_size, departure_with, broken, choice, layout, timeout=120.0)
    assert all(departures), "the row does not see it"
