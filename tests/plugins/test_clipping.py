"""One loop that clips by norm and by value under every plugin, beside one process."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice

from ..pool import Pool
from .training import mean_over_replicas, share

CHOICE = ModelChoice(model_type="llama", tied=True)
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": LowLevelZeroPlugin,
    "hybrid": HybridParallelPlugin,
}
NUM_STEPS = 3
MAX_NORM, VALUE = 0.3, 0.02


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """A step shows the gradients' size, which AdamW's would hide."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def one_process(parts: int) -> tuple[list[float], list[float]]:
    """The loss and the norm of each step of a plain torch loop, over the mean of so many parts of the batch."""
    model = CHOICE.build()
    optimizer, losses, norms = sgd(model), [], []
    for step in range(NUM_STEPS):
        batch = make_batch(CHOICE, num_samples=8, seed=step)
        cut = [{name: tensor.chunk(parts)[part] for name, tensor in batch.items()} for part in range(parts)]
        loss = torch.stack([model(**each).loss for each in cut]).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        nn.utils.clip_grad_value_(model.parameters(), VALUE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train(kind: str, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The same by a plugin."""
    booster = Booster(plugin=PLUGINS[kind](**settings))
    model = CHOICE.build()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batches = share(booster, CHOICE, step)
        if settings.get("pp_size", 1) > 1:
            loss = booster.execute_pipeline(batches, model, loss_of, optimizer)["loss"]
        else:
            loss = model(**next(batches)).loss
            booster.backward(loss, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(MAX_NORM, norm_type=2.0, error_if_nonfinite=True)))
        optimizer.clip_grad_by_value(VALUE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_replicas(loss.item()))
        assert optimizer.get_grad_norm() == pytest.approx(norms[-1])
        assert optimizer.skipped_steps == 0
    return losses, norms


def test_one_loop_clips_under_every_plugin_as_one_process_does(pool: Pool) -> None:
    exact = {"precision": "fp32"}
    for ranks, parts, kind, settings in (
        (2, 2, "ddp", {}),
        (2, 2, "fsdp", exact),
        (4, 4, "fsdp", exact | {"shard_size": 2}),
        (2, 2, "zero", exact | {"stage": 2}),
        (4, 2, "hybrid", exact | {"tp_size": 2, "zero_stage": 1}),
        (4, 4, "hybrid", exact | {"pp_size": 2, "zero_stage": 1, "num_microbatches": 2}),
    ):
        losses, norms = one_process(parts)
        assert min(norms) > MAX_NORM, "nothing to clip"
        for found in pool.run(ranks, train, kind, settings):
            assert found[0] == pytest.approx(losses, rel=1e-5), (kind, settings)
            assert found[1] == pytest.approx(norms, rel=1e-4), (kind, settings)


def test_clipping_without_a_step_leaves_the_next_one_right(pool: Pool) -> None:
    for kind in ("ddp", "fsdp"):
        assert pool.run(2, clip_twice_and_drop, kind) == [True] * 2


def clip_twice_and_drop(kind: str) -> bool:
    """Whether gradients are unscaled once, however often they are clipped and whatever was dropped before."""
    booster = (
        Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16")
        if kind == "ddp"
        else Booster(plugin=TorchFSDPPlugin(precision="fp16"))
    )
    model = CHOICE.build()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    norms = []
    for clips in (1, 2):
        booster.backward(model(**make_batch(CHOICE, num_samples=2, seed=0)).loss, optimizer)
        for _ in range(clips):
            norms.append(float(optimizer.clip_grad_by_norm(float("inf"))))
        optimizer.zero_grad()
    return norms == pytest.approx([norms[0]] * 3, rel=1e-2) and norms[0] < 100
