"""Schedules of the user's own through the plugin: any order that can run gives the numbers of no pipeline at all."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.pipeline.action import Schedule

from ..pipeline.small_schedules import random_schedule
from ..pool import Pool
from .training import LLAMA, boosted, hybrid, loss_of, make_batch, mean_over_replicas, share

CHOICE = replace(LLAMA, num_layers=6)  # tied; a random schedule has at most so many stages
NUM_RANKS = 2


def drawn(seed: int) -> tuple[Schedule, int]:
    """A random order of whole and split backwards, stages anywhere on two ranks; and its number of microbatches."""
    generator = random.Random(seed)
    while True:
        schedule, num_microbatches = random_schedule(generator)
        if len(schedule) == NUM_RANKS and all(schedule) and num_microbatches > 1:
            return schedule, num_microbatches


def figures(sizes: dict[str, Any]) -> list[float]:
    """Loss, norm and the loss of another batch in evaluation, of three steps."""
    booster = hybrid(max_norm=0.5, **sizes)
    model, optimizer = boosted(booster, CHOICE)
    found = []
    for step in range(3):
        loss = booster.execute_pipeline(share(booster, CHOICE, step), model, loss_of, optimizer)["loss"]
        optimizer.step()
        found += [mean_over_replicas(float(loss)), optimizer.get_grad_norm()]
        optimizer.zero_grad()
        with torch.no_grad():
            batch = make_batch(CHOICE, num_samples=5 + step, seed=50)
            found.append(float(booster.execute_pipeline(iter([batch]), model, loss_of)["loss"]))
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_any_order_that_can_run_trains_as_without_a_pipeline(pool: Pool, seed: int, replicas: int) -> None:
    schedule, num_microbatches = drawn(seed)
    plain = {"num_microbatches": num_microbatches, "zero_stage": replicas - 1}
    cut = plain | {"pp_size": NUM_RANKS, "pp_style": schedule}
    expected = pool.run(replicas, figures, plain)[0]
    for found in pool.run(NUM_RANKS * replicas, figures, cut):
        assert found == pytest.approx(expected, rel=1e-5)
