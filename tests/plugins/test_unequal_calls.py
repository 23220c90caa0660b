"""Ranks that call `execute_pipeline` with different arguments, and settings of torch that must not change results."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster.agreement import COMPARED_CALLS
from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool
from .training import LLAMA, boosted, hybrid, share, shares, steps

STEPS = 2


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2}])
def test_a_rank_gets_only_the_results_that_it_requests(pool: Pool, sizes: dict[str, Any]) -> None:
    first, second = pool.run(2, ask_differently, sizes)
    assert first == (None, True, first[2]) if not sizes.get("pp_size") else first[:2] == (None, False)
    assert second[0] is not None and second[1] is False
    # The next step works.
    assert isinstance(first[2], float)


def ask_differently(sizes: dict[str, Any]) -> tuple[float | None, bool, float]:
    """Request outputs on the first rank, and the loss on the second."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    is_first = dist.get_rank() == 0
    with torch.no_grad():
        got = booster.execute_pipeline(
            share(booster, LLAMA, 0), model, loss_of, return_loss=not is_first, return_outputs=is_first
        )
    trained = booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)["loss"]
    optimizer.step()
    loss = got["loss"]
    return None if loss is None else float(loss), got["outputs"] is not None, float(trained)


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


@pytest.mark.parametrize("sizes", [{"pp_size": 2}])
def test_losses_do_not_depend_on_torchs_default_dtype(pool: Pool, sizes: dict[str, Any]) -> None:
    usual, short = (pool.run(2, weigh, sizes, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert short == usual


def weigh(sizes: dict[str, Any], default: torch.dtype) -> list[float]:
    """Return losses and norms; the weights are numbers that bfloat16 cannot represent."""
    booster = hybrid(**sizes)
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
