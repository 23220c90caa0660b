"""States of any shape go from TorchDDPPlugin to owners under another layout, and back, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon import Booster, HybridParallelPlugin, TorchDDPPlugin
from echelon.cluster.gathering import gather_objects
from echelon.verify.model_choice import ModelChoice

from ..plugins.training import share
from ..pool import Pool

LLAMA = ModelChoice(model_type="llama", tied=True, num_layers=2)


def boosted(plugin: Any) -> tuple[Booster, Any, Any]:
    plain, booster = LLAMA.build(), Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1))
    return booster, model, optimizer


def states(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return all states of all ranks by name of parameter and state."""
    if hasattr(optimizer, "buckets"):
        slots = [slot for bucket in optimizer.buckets for slot in bucket.slots if slot.piece is not None]
        pieces = {slot.managed.name: slot.piece for slot in slots}
    else:
        pieces = dict(model.unwrap().named_parameters())
    local = {
        f"{key} {name}": value
        for name, parameter in pieces.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {name: value for of_rank in gather_objects(local) for name, value in of_rank.items()}


def exchange(folder: Path) -> None:
    plugins = (
        lambda: TorchDDPPlugin(),
        lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
        lambda: HybridParallelPlugin(zero_stage=2, precision="fp32"),
        lambda: TorchDDPPlugin(),
    )
    saved: dict[str, Tensor] = {}
    for number, make in enumerate(plugins):
        booster, model, optimizer = boosted(make())
        if number:
            booster.load_checkpoint(folder / str(number - 1), model=model, optimizer=optimizer, resume="must")
            loaded = states(model, optimizer)
            assert loaded.keys() == saved.keys() and any(name.startswith("row_var") for name in loaded)
            assert all(torch.equal(loaded[name], saved[name]) for name in saved), number
        booster.backward(model(**next(share(booster, LLAMA, number))).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        saved = {name: value.clone() for name, value in states(model, optimizer).items()}
        booster.save_checkpoint(folder / str(number), 1, model=model, optimizer=optimizer).wait()


@pytest.mark.slow
def test_factored_states_go_between_plugins_and_layouts(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, exchange, tmp_path)
