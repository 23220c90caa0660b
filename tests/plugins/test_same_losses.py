"""Options and schedules that change no loss: overlapped all-gathers, offload, user schedules, uneven replicas."""

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon import PipelineGradientCheckpointConfig
from echelon.pipeline.action import Schedule
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice

from ..pipeline.small_schedules import random_schedule
from ..pool import Pool
from ..slow import slow_row
from .training import (
    LLAMA,
    RECOMPUTED,
    ULYSSES,
    boosted,
    booster_of,
    hybrid,
    mean_over_replicas,
    share,
    train,
)

QUICK: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("hybrid", {"pp_size": 2, "zero_stage": 2, "pp_style": "zbv"}, {"overlap_allgather": True}),
    ("zero", {"stage": 2, "precision": "bf16"}, {"overlap_allgather": True}),
    ("zero", {"stage": 2, "precision": "bf16"}, {"cpu_offload": True}),
]
SLOW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        ("hybrid", {"zero_stage": 1} | settings, {"overlap_allgather": True})
        for settings in (
            {"tp_size": 2},
            {"zero_size": 2},
            {"zero_stage": 2, "zero_size": 2, "precision": "bf16"},
            {"zero_stage": 2, "tp_size": 2, "cpu_offload": True, "precision": "bf16"},
            {"tp_size": 2, "precision": "fp16", "initial_scale": 2.0**22, "hysteresis": 1},
            ULYSSES,
            {"enable_sequence_parallelism": True, "zero_stage": 2, "tp_size": 2} | RECOMPUTED,
            {"wp_size": 2},
            {"zero_stage": 2, "wp_size": 2, "precision": "bf16"},
            {"pp_size": 2, "zero_bucket_size_in_m": 0.001, "communication_dtype": "bf16"},
        )
    ),
    ("hybrid", {"tp_size": 2, "zero_stage": 1}, {"cpu_offload": True}),
    ("hybrid", {"pp_size": 2, "zero_stage": 2}, {"cpu_offload": True}),
]


@pytest.mark.parametrize(("kind", "settings", "option"), [*QUICK, *(slow_row(*row) for row in SLOW)], ids=str)
def test_an_option_changes_no_loss(
    pool: Pool, kind: str, settings: dict[str, Any], option: dict[str, Any]
) -> None:
    choice, ranks = replace(LLAMA, num_layers=4), 2 if kind == "zero" else 4
    plain = pool.run(ranks, train, kind, settings, choice)
    assert pool.run(ranks, train, kind, settings | option, choice) == plain


def held(settings: dict[str, Any]) -> dict[str, int]:
    booster = booster_of("zero", **settings)
    model, optimizer = boosted(booster, LLAMA)
    booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)
    optimizer.step()
    return dict(booster.plugin.ledger(optimizer).held.items())


def test_masters_and_states_are_on_the_cpu(pool: Pool) -> None:
    held_bytes = pool.run(2, held, {"stage": 1, "precision": "bf16", "cpu_offload": True})[0]
    assert held_bytes["masters"] == held_bytes["states"] == 0
    assert held_bytes["offloaded_states"] == 2 * held_bytes["offloaded_masters"] > 0


def drawn(seed: int) -> tuple[Schedule, int]:
    """Return a random order of undivided and split backwards, on two ranks; and the number of microbatches."""
    generator = random.Random(seed)
    while True:
        schedule, num_microbatches = random_schedule(generator)
        if len(schedule) == 2 and all(schedule) and num_microbatches > 1:
            return schedule, num_microbatches


def figures(choice: ModelChoice, settings: dict[str, Any], samples: list[tuple[int, int]]) -> list[float]:
    """Return losses in training and evaluation, and norms, of steps with these numbers of samples per replica."""
    booster = hybrid(max_norm=0.5, **settings)
    model, optimizer = boosted(booster, choice)
    replica = booster.plugin.data_rank[0]
    num_batches = 2 if settings["zero_stage"] < 2 and "microbatch_size" in settings else 1
    losses_and_norms = []
    for step, counts in enumerate(samples):
        for index in range(num_batches):
            batch = make_batch(choice, num_samples=counts[replica], seed=100 * step + 10 * index + replica)
            other = make_batch(choice, num_samples=5 + step, seed=50)
            is_last = index == num_batches - 1
            with nullcontext() if is_last else booster.no_sync(model, optimizer):
                trained = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
            with torch.no_grad():
                evaluated = booster.execute_pipeline(iter([other]), model, loss_of, return_outputs=True)
            losses_and_norms += [
                mean_over_replicas(float(outputs["loss"])) for outputs in (trained, evaluated)
            ]
        optimizer.step()
        losses_and_norms.append(optimizer.get_grad_norm())
        optimizer.zero_grad()
    return losses_and_norms


SIX_LAYERS = replace(LLAMA, num_layers=6)  # the maximum number of stages of a random schedule
UNEVEN = [(7, 3), (2, 6), (5, 5)]  # samples of each replica's batch; two of them make a microbatch


@pytest.mark.parametrize("replicas", [1, slow_row(2)])
@pytest.mark.parametrize("seed", [0, *(slow_row(seed) for seed in range(1, 6))])
def test_any_order_that_can_run_trains_as_without_a_pipeline(pool: Pool, seed: int, replicas: int) -> None:
    schedule, num_microbatches = drawn(seed)
    plain = {"num_microbatches": num_microbatches, "zero_stage": replicas - 1}
    cut = plain | {"pp_size": 2, "pp_style": schedule}
    expected = pool.run(replicas, figures, SIX_LAYERS, plain, [(8, 8)] * 3)[0]
    for losses_and_norms in pool.run(2 * replicas, figures, SIX_LAYERS, cut, [(8, 8)] * 3):
        assert losses_and_norms == pytest.approx(expected, rel=1e-5)


HALF = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_stage", "beside"),  # at stage 2 batches do not accumulate
    [(0, {}), (1, HALF | {"overlap_p2p": False}), (2, {})],
    ids=str,
)
@pytest.mark.parametrize("choice", [replace(LLAMA, num_layers=9), ModelChoice(model_type="t5")], ids=str)
@pytest.mark.parametrize(
    ("style", "num_chunks"), [("1f1b", 1), ("gpipe", 2), ("interleaved", 2), ("zbh1", 1), ("zbv", 2)]
)
def test_uneven_replicas_have_the_same_losses_with_and_without_a_pipeline(
    pool: Pool, style: str, num_chunks: int, choice: ModelChoice, zero_stage: int, beside: dict[str, Any]
) -> None:
    plain = {"zero_stage": zero_stage, "num_microbatches": None, "microbatch_size": 2}
    cut = plain | beside | {"pp_size": 2, "pp_style": style, "num_model_chunks": num_chunks}
    expected = pool.run(2, figures, choice, plain, UNEVEN)[0]
    for losses_and_norms in pool.run(4, figures, choice, cut, UNEVEN):
        assert losses_and_norms == pytest.approx(expected, rel=2e-5)
