"""T5 through the plugin, over pipelines: losses and weights of plain torch, and the names of the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from echelon.verify.batch import loss_of
from echelon.verify.models import VOCABULARY, ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool
from .training import hybrid

T5 = ModelChoice(model_type="t5", tied=True)
STEPS = 3
MAX_NORM = 0.05  # below every norm, so that each step depends on it


def batch(step: int) -> dict[str, Tensor]:
    """Four samples of equal lengths, so that the mean of microbatches is the batch's."""
    generator = torch.Generator().manual_seed(step)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (4, 11), generator=generator),
        "labels": torch.randint(3, VOCABULARY, (4, 7), generator=generator),
    }


def plain() -> tuple[list[float], nn.Module]:
    """The losses and the model of plain torch, on one process."""
    model = T5.build()
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train(path: Path, sizes: dict[str, Any]) -> tuple[list[float], list[str]]:
    """The losses under a layout, with the model saved to a file; and the names that this rank holds."""
    booster = hybrid(max_norm=MAX_NORM, **sizes)
    model = T5.build()
    wrapped, optimizer, *_ = booster.boost(model, make_optimizer(model), loss_of)
    losses = []
    for step in range(STEPS):
        data = iter([batch(step)])
        losses.append(float(booster.execute_pipeline(data, wrapped, loss_of, optimizer)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(wrapped, path)
    return losses, [name for name, _ in wrapped.unwrap().named_parameters()]


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp_size": 2},
        {"pp_size": 3, "zero_stage": 1},
        {"pp_size": 4, "num_layers_per_stage": [3, 2, 1, 2]},
    ],
    ids=str,
)
def test_a_t5_trains_over_a_pipeline_as_on_one_process(
    pool: Pool, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    path = tmp_path / "model.safetensors"
    by_rank = pool.run(sizes["pp_size"], train, path, sizes)
    expected, model = plain()
    whole = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    for losses, names in by_rank:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert set(names) <= set(every)
    saved = load_file(path)
    assert set(saved) == set(whole)
    for name, tensor in saved.items():
        # AdamW(lr=1e-3, eps=1e-5): where a gradient is near eps, 1e-6 of departure becomes a share of a step.
        torch.testing.assert_close(tensor, whole[name].detach(), rtol=1e-5, atol=1e-5, msg=name)
