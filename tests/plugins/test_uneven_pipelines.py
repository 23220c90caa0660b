"""Replicas that run other numbers of microbatches under every schedule, batches that add up, evaluation in between."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon import PipelineGradientCheckpointConfig
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice

from ..pool import Pool
from .training import LLAMA, boosted, hybrid, mean_over_replicas

CHOICES = {"llama": replace(LLAMA, num_layers=9), "t5": ModelChoice(model_type="t5")}
SAMPLES = [(7, 3), (2, 6), (5, 5)]  # of each replica's batch, by step; two of them make a microbatch
HALF = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)
# By ZeRO's stage, which is what else goes beside the schedule. At stage 2 no batches add up.
BESIDE: dict[int, dict[str, Any]] = {
    0: {},
    1: {"gradient_checkpoint_config": HALF, "overlap_p2p": False},
    2: {},
}


def figures(name: str, sizes: dict[str, Any]) -> list[float]:
    """Losses in training and in evaluation, and norms."""
    choice = CHOICES[name]
    booster = hybrid(max_norm=0.5, num_microbatches=None, microbatch_size=2, **sizes)
    model, optimizer = boosted(booster, choice)
    replica = booster.plugin.data_rank[0]
    num_batches = 1 if sizes["zero_stage"] == 2 else 2
    found = []
    for step, samples in enumerate(SAMPLES):
        for index in range(num_batches):
            batch = make_batch(choice, num_samples=samples[replica], seed=100 * step + 10 * index + replica)
            other = make_batch(choice, num_samples=5 + step, seed=50)
            is_last = index == num_batches - 1
            with nullcontext() if is_last else booster.no_sync(model, optimizer):
                trained = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
            with torch.no_grad():
                evaluated = booster.execute_pipeline(iter([other]), model, loss_of, return_outputs=True)
            found += [mean_over_replicas(float(each["loss"])) for each in (trained, evaluated)]
        optimizer.step()
        found.append(optimizer.get_grad_norm())
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", BESIDE)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    ("style", "num_chunks"), [("1f1b", 1), ("gpipe", 2), ("interleaved", 2), ("zbh1", 1), ("zbv", 2)]
)
def test_a_pipeline_has_the_figures_of_replicas_alone(
    pool: Pool, style: str, num_chunks: int, name: str, zero_stage: int
) -> None:
    expected = pool.run(2, figures, name, {"zero_stage": zero_stage})[0]
    sizes = {"pp_size": 2, "pp_style": style, "num_model_chunks": num_chunks, "zero_stage": zero_stage}
    for found in pool.run(4, figures, name, sizes | BESIDE[zero_stage]):
        assert found == pytest.approx(expected, rel=2e-5)
