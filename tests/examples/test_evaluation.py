"""Evaluation of the examples: every sample is counted once under any layout."""

import pytest
import torch
from torch import Tensor

from echelon import Booster, HybridParallelPlugin, TorchDDPPlugin

from ..pool import Pool
from .scripts import EXAMPLES, load

evaluation = load(EXAMPLES / "evaluation.py")
SAMPLES = 11


def counts(plugin: str, batch_size: int) -> list[float]:
    """Count each of SAMPLES in an evaluation, on every rank."""
    booster = Booster(
        plugin=TorchDDPPlugin() if plugin == "ddp" else HybridParallelPlugin(tp_size=2, precision="fp32")
    )

    def figures(batch: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.one_hot(batch["number"], SAMPLES)

    samples = [{"number": torch.tensor(number)} for number in range(SAMPLES)]
    names = [str(number) for number in range(SAMPLES)]
    model = torch.nn.Linear(1, 1)
    found = evaluation.sums_over(booster, model, samples, batch_size=batch_size, names=names, figures=figures)
    assert model.training
    return list(found.values())


@pytest.mark.parametrize("plugin", ["ddp", "hybrid"])
@pytest.mark.parametrize("batch_size", [4, 24])  # leaves a batch of 3, and exceeds the samples
def test_every_sample_is_counted_once(pool: Pool, plugin: str, batch_size: int) -> None:
    assert pool.run(4, counts, plugin, batch_size) == [[1.0] * SAMPLES] * 4
