"""Ranks that call `execute_pipeline` with different arguments, and settings of torch that must not change results."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon import Booster, TorchDDPPlugin
from echelon.cluster.agreement import COMPARED_CALLS
from echelon.cluster.errors import UnmatchedCall
from echelon.pipeline.action import Schedule
from echelon.pipeline.schedules import gpipe, one_f_one_b
from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool
from .training import LLAMA, boosted, hybrid, share

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


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"zero_stage": 1}])
def test_gradients_enabled_on_some_ranks_only_are_refused_on_all(pool: Pool, sizes: dict[str, Any]) -> None:
    for error in pool.run_failing(2, train_on_the_first, sizes):
        assert isinstance(error, ValueError)
        assert "called to train on rank(s) [0] and under torch.no_grad() on the others" in str(error)


def train_on_the_first(sizes: dict[str, Any]) -> None:
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)


def train_and_evaluate_one_replica() -> float:
    booster = hybrid()
    model, optimizer = boosted(booster, LLAMA)
    for step in range(COMPARED_CALLS + 2):
        if dist.get_rank() == 0 and step == 1:
            with torch.no_grad():
                model(**make_batch(LLAMA, num_samples=2, seed=7))
        loss = booster.execute_pipeline(share(booster, LLAMA, step), model, loss_of, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


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


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ([{"zero_stage": 1}, {"zero_stage": 2}], "zero_stage is 1 on rank(s) [0] and 2 on rank(s) [1]"),
        ([{"pp_size": 2}, {"tp_size": 2}], "pp_size is 2 on rank(s) [0] and 1 on rank(s) [1]"),
        (
            [{"pp_size": 2, "num_layers_per_stage": each} for each in ([3, 1], [2, 2])],
            "num_layers_per_stage is [3, 1] on rank(s) [0] and [2, 2] on rank(s) [1]",
        ),
        ([{"precision": "fp16"}, {}], "precision is 'fp16' on rank(s) [0] and 'fp32' on rank(s) [1]"),
        (
            [{"communication_dtype": torch.bfloat16}, {}],
            "torch.bfloat16 on rank(s) [0] and None on rank(s) [1]",
        ),
    ],
)
def test_plugins_of_different_settings_are_refused_on_all_ranks(
    pool: Pool, settings: list[dict[str, Any]], reported: str
) -> None:
    for error in pool.run_failing(2, make_differently, settings):
        assert isinstance(error, ValueError)
        assert "the settings of the plugin differ between ranks" in str(error)
        assert reported in str(error)


def make_differently(settings: list[dict[str, Any]]) -> None:
    hybrid(**settings[dist.get_rank()])


def test_optimizers_of_different_settings_are_refused_on_all_ranks(pool: Pool) -> None:
    for error in pool.run_failing(2, boost_different_optimizers):
        assert isinstance(error, ValueError)
        assert "lr of group 0 is 0.1 on rank(s) [0] and 0.2 on rank(s) [1]" in str(error)


def boost_different_optimizers() -> None:
    model = LLAMA.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    hybrid(zero_stage=1).boost(model, optimizer)


def test_clipping_that_differs_between_ranks_is_refused_on_all(pool: Pool) -> None:
    for differing, unmatched in pool.run(2, clip_differently):
        assert "max_norm is 1.0 on rank(s) [0] and 2.0 on rank(s) [1]" in differing
        assert "every rank must make the same calls" in unmatched


def clip_differently() -> list[str]:
    """Return the errors of ranks that clip to different norms, and of a rank that clips while the other steps."""
    booster, rank, found = hybrid(tp_size=2), dist.get_rank(), []
    for clips in (True, rank == 0):
        model, optimizer = boosted(booster, LLAMA)
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)
        with pytest.raises((ValueError, UnmatchedCall)) as refused:
            optimizer.clip_grad_by_norm(1.0 + rank) if clips else optimizer.step()
        found.append(str(refused.value))
    return found


def test_torchs_plugins_detect_settings_and_clipping_of_one_rank(pool: Pool) -> None:
    for errors in pool.run(2, train_differently):
        for found, reported in zip(
            errors, ("static_graph is True on", "mixed_precision is", "max_norm is 0.1 on"), strict=True
        ):
            assert reported in found and "rank(s) [1]" in found


def train_differently() -> list[str]:
    """Return the errors of different arguments and precisions at boost, and of clipping at the second step."""
    rank, found = dist.get_rank(), []
    plugins = [TorchDDPPlugin(static_graph=rank == 0), TorchDDPPlugin()]
    for plugin, precision in zip(plugins, ("fp32", ("fp32", "bf16")[rank]), strict=True):
        with pytest.raises(ValueError, match="the settings of the plugin differ") as refused:
            boosted(Booster(plugin=plugin, mixed_precision=precision), LLAMA)  # type: ignore[arg-type]
        found.append(str(refused.value))
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer = boosted(booster, LLAMA)
    with pytest.raises(ValueError, match="the settings of the optimizer differ") as refused:
        for step in range(2):
            booster.backward(model(**make_batch(LLAMA, num_samples=2, seed=step)).loss, optimizer)
            if rank == 0:
                optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
    return [*found, str(refused.value)]


def test_schedules_that_differ_between_ranks_are_refused_on_all(pool: Pool) -> None:
    for error in pool.run_failing(2, run_different_schedules):
        assert isinstance(error, ValueError)
        assert "for 2 microbatches on pipeline rank(s) [1] differs from that on the first" in str(error)


def run_different_schedules() -> None:
    def own(num_ranks: int, num_microbatches: int) -> Schedule:
        build = gpipe if dist.get_rank() == 0 else one_f_one_b
        return build(num_ranks, num_microbatches)

    booster = hybrid(pp_size=2, pp_style=own)
    model, optimizer = boosted(booster, LLAMA)
    booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)
