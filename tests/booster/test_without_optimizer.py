"""Models boosted without an optimizer: evaluated, saved, and never trained to different weights on each replica."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice

from ..plugins.training import booster_of, full
from ..pool import Pool

CHOICE = ModelChoice(model_type="llama", num_layers=2)
LENGTH = 9


def evaluate_save_and_train(plugin: str, sizes: dict[str, int], folder: Path) -> str:
    """Return the error of a backward, after the model was evaluated and saved."""
    booster = booster_of(plugin, precision="fp32", **sizes)
    plain = CHOICE.build().eval()
    batch = make_batch(CHOICE, num_samples=4, seed=0)
    expected = plain(**batch).loss.detach()
    model, *_ = booster.boost(plain)
    torch.testing.assert_close(model(**batch).loss, expected)  # gradients are enabled, but not requested
    with torch.no_grad():
        torch.testing.assert_close(booster.execute_pipeline(iter([batch]), model)["loss"], expected)
    booster.save_model(model, folder, shard=True).wait()
    model.train()
    loss = model(**make_batch(CHOICE, num_samples=4, seed=booster.plugin.data_rank[0])).loss
    with pytest.raises(RuntimeError) as refusal:
        loss.backward()
    return str(refusal.value)


@pytest.mark.parametrize(("plugin", "sizes"), [("zero2", {}), ("hybrid", {}), ("hybrid", {"tp_size": 2})])
def test_a_model_boosted_without_an_optimizer_is_evaluated_and_saved_and_refuses_a_backward(
    pool: Pool, plugin: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    for reported in pool.run(2, evaluate_save_and_train, plugin, sizes, tmp_path):
        assert reported.startswith(
            "the model was boosted without an optimizer, so its gradients are not averaged"
        )
        assert "booster.boost(model, optimizer)" in reported


def step_by_hand(plugin: str) -> dict[str, Tensor]:
    """Return the weights after two steps of an optimizer that was not boosted, each rank on its shard of a batch."""
    model, *_ = booster_of(plugin).boost(CHOICE.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = torch.randint(3, 50, (4, LENGTH), generator=torch.Generator().manual_seed(step))
        local_ids = ids.chunk(dist.get_world_size())[dist.get_rank()]
        model(input_ids=local_ids, labels=local_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(value) for name, value in model.unwrap().named_parameters()}


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_torchs_wrappers_average_the_gradients_without_a_boosted_optimizer(pool: Pool, plugin: str) -> None:
    (expected,) = pool.run(1, step_by_hand, "hybrid")
    for weights in pool.run(2, step_by_hand, plugin):
        torch.testing.assert_close(weights, expected)
