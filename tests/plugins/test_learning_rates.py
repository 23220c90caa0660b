"""Learning rates stay equal on all ranks: the loss for schedulers is equal, and differing options are errors."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool, on_ranks
from ..slow import slow_row
from .training import (
    BERT,
    LLAMA,
    boosted,
    booster_of,
    calls_of,
    hybrid,
    norm_of_gradients,
    refused,
    share,
    shares,
    steps,
)

FOUR_LAYERS = replace(BERT, num_layers=4)  # two ranks of zbv have four stages


@pytest.mark.parametrize("stage", [1, slow_row(2)])
def test_a_scheduler_of_the_returned_loss_acts_alike_on_all_replicas(pool: Pool, stage: int) -> None:
    first, second = pool.run(2, reduce_on_plateau, stage)
    assert first == second
    assert first["lr"] < 1e-3  # the scheduler has reduced it


def reduce_on_plateau(stage: int) -> dict[str, float]:
    """Train with losses that fall on the first replica, rise on the second, and have a constant mean."""
    booster = hybrid(zero_stage=stage, num_microbatches=None)
    model, optimizer = boosted(booster)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=1, min_lr=1e-7)
    sign = 1 if dist.get_rank() else -1
    for step in range(6):

        def criterion(outputs: Any, inputs: Any, step: int = step) -> Tensor:
            return outputs.loss * 1e-3 + 5 + sign * step

        loss = booster.execute_pipeline(share(booster, BERT, step), model, criterion, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
    weights = sum(float(weight.double().sum()) for weight in optimizer.masters().values())
    return {"lr": optimizer.param_groups[0]["lr"], "weights": weights, "loss": float(loss)}


@pytest.mark.parametrize("sizes", [{"zero_stage": 2}, {"pp_size": 2, "pp_style": "zbv"}], ids=str)
def test_the_returned_loss_is_the_one_of_the_gradients(pool: Pool, sizes: dict[str, Any]) -> None:
    """Replicas with batches of different sizes, and different numbers of microbatches."""
    model = FOUR_LAYERS.build()
    expected_losses = [model(**batch_of(replica)).loss for replica in range(2)]
    both = zip(batch_of(0).items(), batch_of(1).values(), strict=True)
    loss = model(**{name: torch.cat([first, second]) for (name, first), second in both}).loss
    loss.backward()
    norm = norm_of_gradients(model)
    for mean, replica_loss, last_norm, replica in pool.run(2 * sizes.get("pp_size", 1), losses_of, sizes):
        assert mean == pytest.approx(loss.item(), rel=1e-5)
        assert replica_loss == pytest.approx(expected_losses[replica].item(), rel=1e-5)
        assert last_norm == pytest.approx(norm, rel=1e-4)


def batch_of(replica: int) -> dict[str, Tensor]:
    return make_batch(FOUR_LAYERS, num_samples=4 + 2 * replica, seed=replica)


def losses_of(sizes: dict[str, Any]) -> tuple[float, float, float | None, int]:
    """Return the mean over replicas, the replica's own loss, the norm of the gradients, and the replica."""
    booster = hybrid(**{"num_microbatches": None, "microbatch_size": 2, **sizes})
    model, optimizer = boosted(booster, FOUR_LAYERS)
    replica, _ = booster.plugin.data_rank
    trained = booster.execute_pipeline(iter([batch_of(replica)]), model, loss_of, optimizer)["loss"]
    with torch.no_grad():
        evaluated, replica_loss = (
            booster.execute_pipeline(iter([batch_of(replica)]), model, loss_of, average_loss=average)["loss"]
            for average in (True, False)
        )
    assert float(evaluated) == pytest.approx(float(trained), rel=1e-6)
    optimizer.step()
    return float(trained), float(replica_loss), optimizer.last_norm, replica


@pytest.mark.parametrize("average_loss", [True, slow_row(False)])
def test_ranks_may_request_different_losses(pool: Pool, average_loss: bool) -> None:
    first, second = pool.run(2, ask_for_different_losses, average_loss)
    assert first[0] == second[0] == pytest.approx((first[1] + second[1]) / 2, rel=1e-6)
    assert first[1] != second[1]
    assert first[2] == first[0] and second[2] == second[1]


def ask_for_different_losses(weighted: bool) -> tuple[float, float, float]:
    """Return the mean, the replica's own loss, and the mean requested by the first rank only."""
    booster = hybrid()
    model, _ = boosted(booster)

    def criterion(outputs: Any, inputs: Any) -> Any:
        return (outputs.loss * 7, 7) if weighted else outputs.loss

    with torch.no_grad():
        mean, replica_loss, mixed = (
            booster.execute_pipeline(share(booster, BERT, 0), model, criterion, average_loss=average)["loss"]
            for average in (True, False, dist.get_rank() == 0)
        )
    return float(mean), float(replica_loss), float(mixed)


@on_ranks(4)
def test_the_loss_takes_one_message() -> None:
    booster = hybrid(pp_size=2)
    model, _ = boosted(booster)
    with torch.no_grad():
        booster.execute_pipeline(share(booster, BERT, 0), model, loss_of)
        with booster.plugin.ledger() as ledger:
            booster.execute_pipeline(share(booster, BERT, 0), model, loss_of)
    calls = {key: calls for key, calls in calls_of(ledger).items() if " all_" in key[1] or "broad" in key[1]}
    assert calls == {("world", "small all_gather"): 1, ("world", "small all_reduce"): 1}, calls


# By option: the values of both ranks, and its name in the error.
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "lr": (1e-3, 1e-4, "0.001 on rank(s) [0] and 0.0001 on rank(s) [1]"),
    "betas": ((0.9, 0.999), (0.8, 0.999), "[0.9, 0.999] on rank(s) [0] and [0.8, 0.999] on rank(s) [1]"),
    "weight_decay": (torch.tensor(0.5), torch.tensor(0.25), "0.5 on rank(s) [0] and 0.25 on rank(s) [1]"),
    "eps": (numpy.float32(0.5), 0.25, "0.5 on rank(s) [0] and 0.25 on rank(s) [1]"),
}


@pytest.mark.parametrize("sizes", [{"zero_stage": 1}, {"tp_size": 2}, {"pp_size": 2}], ids=str)
@on_ranks(2)
def test_an_option_that_differs_between_ranks_is_detected_at_the_step(sizes: dict[str, Any]) -> None:
    """No parameter changes then, and with equal options training continues."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    group = optimizer.param_groups[1]
    for name, (*values, described) in DIFFERENT.items():
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)
        before = {key: weight.clone() for key, weight in model.tensors().items()}
        usual, group[name] = group[name], values[dist.get_rank()]
        message = refused(optimizer.step)
        assert message.startswith("the settings of the optimizer differ between ranks"), message
        assert f"{name} of group 1 is {described}" in message, message
        torch.testing.assert_close(dict(model.tensors()), before, rtol=0, atol=0)
        group[name] = usual
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_under_torchs_plugins_it_is_detected_at_the_next_step(kind: str) -> None:
    """A step of these plugins has no reduction that could include the comparison."""
    booster = booster_of(kind)
    model, optimizer = boosted(booster, LLAMA)
    scheduler = StepLR(optimizer, step_size=1)
    training = steps(booster, model, optimizer, shares(booster, LLAMA, 5), by_calls=True)
    for step in range(4):
        if step == 3 and dist.get_rank() == 0:
            scheduler.step()
        next(training)
    message = refused(partial(next, training))
    assert message.startswith("the settings of the optimizer differ between ranks"), message
    assert "lr of group 0 is 0.0001 on rank(s) [0] and 0.001 on rank(s) [1]" in message, message


@on_ranks(2)
def test_options_are_compared_without_an_additional_message() -> None:
    booster = hybrid()
    model, optimizer = boosted(booster)
    for _ in range(2):
        booster.execute_pipeline(share(booster, BERT, 0), model, loss_of, optimizer)
        optimizer.reduce_gradients()
        with booster.plugin.ledger() as ledger:
            optimizer.step()
        optimizer.zero_grad()
    calls = calls_of(ledger)
    assert calls == {("dp", "small all_gather"): 1, ("dp", "small all_reduce"): 1}, calls
