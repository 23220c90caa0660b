"""Batch normalization under data parallelism: one set of running statistics, in every precision and plugin."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..pool import Pool
from ..slow import slow_except
from .training import boosted, booster_of, full, parts

BOOSTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("hybrid", {"precision": "fp32"}),
    "replicas bf16": ("hybrid", {"precision": "bf16"}),
    "zero fp16": ("zero", {"precision": "fp16", "initial_scale": 8}),
    "zero 2": ("zero2", {"precision": "fp32"}),
    "ddp": ("ddp", {}),
    "ddp bf16": ("ddp", {"precision": "bf16"}),
    "fsdp": ("fsdp", {}),
    "fsdp bf16": ("fsdp", {"precision": "bf16"}),
}
EXACT = [name for name in BOOSTERS if not name.endswith("16")]
STEPS = 3
CALLS = 2  # before each step: between them torch would broadcast the first rank's statistics
LR = 0.1 / CALLS  # gradients of the calls are summed


class Pictures(nn.Module):
    """A convolution, its normalization, and a classifier."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.norm_after = nn.BatchNorm1d(3, momentum=None)
        self.recomputes = recomputes

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        block = partial(checkpoint, self.block, use_reentrant=False) if self.recomputes else self.block
        hidden = block(pixels)
        logits = self.norm_after(self.head(hidden.mean((2, 3))))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}

    def block(self, pixels: Tensor) -> Tensor:
        return self.norm(self.conv(pixels)).relu()


def batch_of(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    pixels = torch.randn(8, 3, 6, 6, generator=drawn) + torch.arange(8.0).view(8, 1, 1, 1)
    return {"pixels": pixels, "labels": torch.randint(3, (8,), generator=drawn)}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in (*model.named_parameters(), *model.named_buffers())}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def plain(num_replicas: int) -> dict[str, Tensor]:
    """Run a plain loop; with replicas, average gradients and running statistics in every step."""
    replicas = [Pictures() for _ in range(num_replicas)]
    optimizers = [*map(sgd, replicas)]
    for step in range(STEPS):
        for call in range(CALLS):
            batches = parts(batch_of(CALLS * step + call), num_replicas)
            for replica, batch in zip(replicas, batches, strict=True):
                replica(**batch)["loss"].backward()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad.copy_(mean)
        with torch.no_grad():
            for buffers in zip(*(replica.buffers() for replica in replicas), strict=True):
                mean = torch.stack([*buffers]).double().mean(0)
                for buffer in buffers:
                    buffer.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(replicas[0])


def trained(
    name: str, folder: Path | None = None, *, sync: bool = False, recomputes: bool = False
) -> dict[str, Tensor]:
    kind, settings = BOOSTERS[name]
    booster, pictures = booster_of(kind, **settings), Pictures(recomputes=recomputes)
    if sync:
        pictures = nn.SyncBatchNorm.convert_sync_batchnorm(pictures)
    model, optimizer = boosted(booster, pictures, sgd)
    model.train()
    for step in range(STEPS):
        for call in range(CALLS):
            batch = parts(batch_of(CALLS * step + call), dist.get_world_size())[dist.get_rank()]
            booster.backward(model(**batch)["loss"], optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        booster.save_model(model, folder / "model.safetensors").wait()
    return state_of(model.unwrap())


@pytest.mark.parametrize("name", slow_except(("replicas", "zero fp16", "ddp", "fsdp bf16"), BOOSTERS))
def test_replicas_have_and_save_the_mean_of_their_running_statistics(
    pool: Pool, name: str, tmp_path: Path
) -> None:
    first, second = pool.run(2, trained, name, tmp_path)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    statistics = {key: value for key, value in first.items() if "running" in key}
    assert {value.dtype for value in statistics.values()} == {torch.float32}
    saved = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close({key: saved[key] for key in statistics}, statistics, rtol=0, atol=0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if name in EXACT else {"rtol": 0.05, "atol": 0.05}
    expected = plain(2)
    torch.testing.assert_close(statistics, {key: expected[key] for key in statistics}, **tolerance)
    if name in EXACT:
        torch.testing.assert_close(first, expected, **tolerance)


@pytest.mark.parametrize("name", slow_except(("replicas", "ddp"), BOOSTERS))
def test_torchs_sync_batch_norm_normalizes_over_all_replicas_as_one_process_does(
    pool: Pool, name: str
) -> None:
    first, second = pool.run(2, trained, name, sync=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = plain(1)
    if name in EXACT:
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    else:
        for key in ("norm.running_mean", "norm.running_var"):
            # bf16 alone differs by 6 % after six forwards; half the batch would have half the variance.
            torch.testing.assert_close(first[key], expected[key], rtol=0.2, atol=0.2)


def test_a_recomputed_batch_counts_once(pool: Pool) -> None:
    (expected,) = pool.run(1, trained, "replicas")
    (recomputed,) = pool.run(1, trained, "replicas", recomputes=True)
    torch.testing.assert_close(recomputed, expected)
    torch.testing.assert_close(recomputed, plain(1), rtol=1e-5, atol=1e-5)
