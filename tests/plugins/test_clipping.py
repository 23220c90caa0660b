"""The same loop clips by norm and by value under every plugin, compared with one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Booster
from echelon.verify.batch import make_batch

from ..pool import Pool, on_ranks
from .training import LLAMA, boosted, booster_of, forward_and_backward, hybrid, mean_over_replicas, parts, sgd

NUM_STEPS = 3
MAX_NORM, VALUE = 0.3, 0.02


def one_process(replicas: int) -> tuple[list[float], list[float]]:
    """Return the loss and the norm of each step of a plain torch loop, averaged over parts of a batch."""
    model = LLAMA.build()
    optimizer, losses, norms = sgd(model), [], []
    for step in range(NUM_STEPS):
        batches = parts(make_batch(LLAMA, num_samples=8, seed=step), replicas)
        loss = torch.stack([model(**batch).loss for batch in batches]).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        nn.utils.clip_grad_value_(model.parameters(), VALUE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train(kind: str, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Train the same steps under a plugin."""
    booster = booster_of(kind, **settings)
    model, optimizer = boosted(booster, LLAMA, sgd)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = forward_and_backward(booster, model, optimizer, LLAMA, step)
        norms.append(float(optimizer.clip_grad_by_norm(MAX_NORM, norm_type=2.0, error_if_nonfinite=True)))
        optimizer.clip_grad_by_value(VALUE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_replicas(loss.item()))
        assert optimizer.get_grad_norm() == pytest.approx(norms[-1])
        assert optimizer.skipped_steps == 0
    return losses, norms


@pytest.mark.slow
def test_one_loop_clips_under_every_plugin_as_one_process_does(pool: Pool) -> None:
    for ranks, replicas, kind, settings in (
        (2, 2, "ddp", {}),
        (2, 2, "fsdp", {}),
        (4, 4, "fsdp", {"shard_size": 2}),
        (2, 2, "zero2", {}),
        (4, 2, "hybrid", {"tp_size": 2, "zero_stage": 1}),
        (4, 1, "hybrid", {"pp_size": 2, "zero_stage": 1}),
    ):
        losses, norms = one_process(replicas)
        assert min(norms) > MAX_NORM, "nothing to clip"
        for figures in pool.run(ranks, train, kind, settings):
            assert figures[0] == pytest.approx(losses, rel=1e-5), (kind, settings)
            assert figures[1] == pytest.approx(norms, rel=1e-4), (kind, settings)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_clipping_without_a_step_leaves_the_next_one_right(kind: str) -> None:
    """Gradients are unscaled once, after several clippings and after dropping gradients."""
    booster = booster_of(kind, precision="fp16")
    model, optimizer = boosted(booster, LLAMA, sgd)
    norms = []
    for clips in (1, 2):
        booster.backward(model(**make_batch(LLAMA, num_samples=2, seed=0)).loss, optimizer)
        for _ in range(clips):
            norms.append(float(optimizer.clip_grad_by_norm(float("inf"))))
        optimizer.zero_grad()
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-2) and norms[0] < 100, norms


CLIPS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3),
    "norm in one kernel": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=True),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3),
}


@on_ranks(2)
def test_torchs_clipping_is_refused_under_every_plugin_that_cannot_take_it() -> None:
    for kind, accumulates in (("zero2", True), ("ddp", True), ("fsdp", False)):
        refuse_clips(booster_of(kind, precision="fp16"), accumulates)
    refuse_clips(hybrid(tp_size=2), False)
    refuse_clips(hybrid(pp_size=2, zero_stage=2), False)


def refuse_clips(booster: Booster, accumulates: bool) -> None:
    """Require errors, at once or in the step, also with later accumulation; for parameters of wrapper and model."""
    model, optimizer = boosted(booster, LLAMA, sgd)

    def backward() -> None:
        forward_and_backward(booster, model, optimizer, LLAMA, 0)

    for name, clip in CLIPS.items():
        for parameters in (list(model.parameters()), list(model.unwrap().parameters())):
            backward()
            with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_by_norm\(max_norm\)"):
                clip(parameters)
                if accumulates:
                    backward()
                optimizer.step()
                raise AssertionError(f"{name} was not noticed: {booster.plugin}")
            dist.barrier()
            optimizer.zero_grad()
    backward()
    optimizer.step()
