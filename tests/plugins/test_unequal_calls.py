"""Ranks that call `execute_pipeline` with different arguments, and settings of torch that must not change results."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster.agreement import COMPARED_CALLS
from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool, on_ranks
from .training import LLAMA, boosted, hybrid, share, shares, steps

STEPS = 2


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2}])
@on_ranks(2)
def test_a_rank_gets_only_the_results_that_it_requests(sizes: dict[str, Any]) -> None:
    """The first one requests outputs, which the first stage of a pipeline lacks, and the second the loss."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    is_first = dist.get_rank() == 0
    with torch.no_grad():
        got = booster.execute_pipeline(
            share(booster, LLAMA, 0), model, loss_of, return_loss=not is_first, return_outputs=is_first
        )
    assert (got["loss"] is None) == is_first
    assert (got["outputs"] is not None) == (is_first and "tp_size" in sizes)
    assert next(steps(booster, model, optimizer, share(booster, LLAMA, 0))) > 0  # the next step works


def train_and_evaluate_one_replica() -> float:
    booster = hybrid()
    model, optimizer = boosted(booster, LLAMA)
    trained = steps(booster, model, optimizer, shares(booster, LLAMA, COMPARED_CALLS + 2))
    next(trained)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(**make_batch(LLAMA, num_samples=2, seed=7))
    return [*trained][-1]


def test_a_replica_may_evaluate_by_itself_between_steps(pool: Pool) -> None:
    first, second = pool.run(2, train_and_evaluate_one_replica)
    assert first == second


def test_losses_do_not_depend_on_torchs_default_dtype(pool: Pool) -> None:
    usual, short = (pool.run(2, weigh, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert short == usual


def weigh(default: torch.dtype) -> list[float]:
    """Return losses and norms; the weights are numbers that bfloat16 cannot represent."""
    booster = hybrid(pp_size=2)
    model, optimizer = boosted(booster, LLAMA)

    def criterion(outputs: Any, inputs: Any) -> tuple[Tensor, float]:
        return outputs.loss * 1001.0, 1001.0

    torch.set_default_dtype(default)
    figures = []
    try:
        for step in range(STEPS):
            batch = make_batch(LLAMA, num_samples=4, seed=10 * step + booster.plugin.data_rank[0])
            output = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
            norm = optimizer.clip_grad_by_norm(1e9)
            optimizer.step()
            optimizer.zero_grad()
            figures += [float(output["loss"]), float(norm), optimizer.last_norm]
    finally:
        torch.set_default_dtype(torch.float32)
    return figures
