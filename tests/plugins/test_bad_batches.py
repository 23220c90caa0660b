"""A batch of one rank that cannot be run: an error on every rank, the same where the ranks compare the call."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.cluster.agreement import COMPARED_CALLS
from echelon.cluster.errors import RankFailure
from echelon.verify.batch import make_batch

from ..pool import Pool
from .training import BERT, boosted, hybrid, steps

WRONG = {
    "gradient": "the batch requires gradients (scale), but",
    "number": "num_items_in_batch=-1 in the batch must be a number above 0",
    "lengths": "the tensors of a batch must be equally long along their batch dims",
    "short": "num_microbatches=2 is more than the 1 samples of the batch on rank(s) [1]",
}


def wrong(kind: str, seed: int) -> dict[str, Any]:
    """Return a batch that cannot be run."""
    batch = make_batch(BERT, num_samples=1 if kind == "short" else 4, seed=seed)
    others = {"gradient": {"scale": torch.ones(4, requires_grad=True)}, "number": {"num_items_in_batch": -1}}
    if kind == "lengths":
        batch["labels"] = batch["labels"][:3]
    return {**batch, **others.get(kind, {})}


def train(kind: str, number: int) -> None:
    """Call `execute_pipeline` on two replicas, the last time with a bad batch of rank 1."""
    booster = hybrid(num_microbatches=2)
    model, optimizer = boosted(booster)
    batches = [make_batch(BERT, num_samples=4, seed=call) for call in range(number)]
    if dist.get_rank() == 1:
        batches[-1] = wrong(kind, number - 1)
    for _ in steps(booster, model, optimizer, batches):
        pass


@pytest.mark.parametrize("kind", WRONG)
def test_a_bad_batch_of_one_rank_raises_the_same_on_all_in_a_compared_call(pool: Pool, kind: str) -> None:
    errors = pool.run_failing(2, train, kind, COMPARED_CALLS)
    assert [type(error) for error in errors] == [ValueError] * 2, errors
    (text,) = {str(error) for error in errors}
    assert text.startswith(WRONG[kind]) and (kind == "short" or text.endswith(" (rank 1)"))


@pytest.mark.parametrize("kind", WRONG)
def test_a_bad_batch_of_one_rank_is_named_by_the_others_in_any_other_call(pool: Pool, kind: str) -> None:
    waiting, raising = pool.run_failing(2, train, kind, COMPARED_CALLS + 1)
    assert type(raising) is ValueError and str(raising).startswith(WRONG[kind]), raising
    assert isinstance(waiting, RankFailure) and waiting.rank == 1
    assert str(waiting).startswith(f"rank 1 failed: ValueError: {WRONG[kind]}")
