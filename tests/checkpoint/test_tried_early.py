"""What would make a save fail is refused at boost, and what comes later ends no run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import GPT2Config, GPT2DoubleHeadsModel

from echelon import Booster, HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..plugins.training import Numbers, hybrid, share
from ..pool import Pool
from .failures import logged

LLAMA = ModelChoice(model_type="llama", num_layers=2)
PLUGINS: dict[str, Callable[[], Any]] = {
    "hybrid": lambda: HybridParallelPlugin(precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}


def double_heads() -> GPT2DoubleHeadsModel:
    """A model whose class changes its config into one that its own constructor refuses."""
    settings = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 101,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    config = GPT2Config(**settings, problem_type="single_label_classification")
    return GPT2DoubleHeadsModel(config)


def save_a_config_as_it_is(folder: Path, kind: str) -> None:
    booster = Booster(plugin=PLUGINS[kind]())
    model = double_heads()
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))  # type: ignore[assignment]
    booster.save_model(model, folder / "model", shard=True)
    booster.save_checkpoint(folder, 1, model=model, optimizer=optimizer).wait()
    resumed = booster.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert resumed is not None and resumed.step == 1


@pytest.mark.parametrize("kind", PLUGINS)
def test_a_config_is_written_as_it_is(pool: Pool, tmp_path: Path, kind: str) -> None:
    double_heads().save_pretrained(tmp_path / "plain")
    pool.run(2, save_a_config_as_it_is, tmp_path, kind)
    for folder in (tmp_path / "model", tmp_path / "step-00000001" / "model"):
        for name in ("config.json", "generation_config.json"):
            plain, saved = (json.loads((each / name).read_text()) for each in (tmp_path / "plain", folder))
            assert saved == plain, name


class Remembering(nn.Module):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


class Stubborn(LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.lr_lambdas[0]}


def refusal(kind: str) -> str:
    """Why a model, optimizer and scheduler are not boosted of which no checkpoint could be written."""
    model: Any = LLAMA.build()
    model.config.table = torch.zeros(2)
    model.generation_config.rule = print
    model.model.memory = Remembering()
    model.model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    optimizer = torch.optim.SGD([{"params": model.parameters(), "rule": lambda: 1}], lr=0.1)
    with pytest.raises(ValueError) as error:
        Booster(plugin=PLUGINS[kind]()).boost(
            model, optimizer, lr_scheduler=Stubborn(optimizer, lambda step: 1)
        )
    return str(error.value)


@pytest.mark.parametrize("kind", PLUGINS)
def test_what_no_checkpoint_can_hold_is_refused_at_boost(pool: Pool, kind: str) -> None:
    ((text),) = pool.run(1, refusal, kind)
    for needle in (
        "the model's config cannot be written as JSON",
        "the model's generation_config cannot be written as JSON",
        "model.memory._extra_state cannot be saved",
        "the option 'rule' of a parameter group cannot be saved",
        "the state of the Stubborn cannot be saved",
    ):
        assert needle in text


def refused_format() -> str:
    model: Any = LLAMA.build()
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError) as error:
        hybrid().boost(model)
    return str(error.value)


def test_a_format_that_files_have_not_is_refused_at_boost(pool: Pool) -> None:
    assert "phases is torch.complex128, which safetensors files cannot hold" in pool.run(1, refused_format)[0]


def spoil_a_config(folder: Path) -> tuple[str, list[str], int]:
    """A config that is changed in training into what cannot be written; the run and its older step go on."""
    booster = hybrid()
    model: Any
    plain: Any = LLAMA.build()
    model, optimizer, *_ = booster.boost(plain, make_optimizer(plain))
    parts = {"model": model, "optimizer": optimizer}
    booster.save_checkpoint(folder, 1, **parts).wait()
    model.unwrap().config.table = torch.zeros(2)
    with logged("echelon.checkpoint.background") as lines:
        save = booster.save_checkpoint(folder, 2, **parts)
    del model.unwrap().config.table
    resumed = booster.load_checkpoint(folder, **parts)
    assert resumed is not None
    return str(save.failure), lines, resumed.step


def test_a_checkpoint_that_cannot_be_written_ends_no_run(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, spoil_a_config, tmp_path)
    assert "Tensor is not JSON serializable" in first[0] and first[0] == second[0]
    assert "saving to" in first[1][0] and second[1] == []
    assert first[2] == second[2] == 1


class Backwards(Sampler[int]):
    """Without a state."""

    def __init__(self, dataset: Any, *_: Any, **__: Any) -> None:
        self._indices = range(len(dataset))

    def __iter__(self) -> Any:
        return reversed(self._indices)


def begin_with_a_loader_without_a_position(folder: Path) -> str:
    booster = hybrid()
    model = LLAMA.build()
    boosted, *_ = booster.boost(model)
    loader = booster.plugin.prepare_dataloader(Numbers(), 4, distributed_sampler_cls=Backwards)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as error:
        booster.load_checkpoint(folder, model=boosted, dataloader=loader)
    return str(error.value)


def test_data_without_a_position_are_refused_where_a_run_begins(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, begin_with_a_loader_without_a_position, tmp_path):
        assert "the position in the data of a Backwards is not known" in text


def go_on_with_factored_states(folder: Path) -> list[list[dict[str, Any]]]:
    """States after three steps; and after the last of them once more, from a checkpoint of the second."""
    found = []
    for resumes in (False, True):
        booster = Booster(plugin=TorchDDPPlugin())
        plain = LLAMA.build()
        model: Any
        model, optimizer, *_ = booster.boost(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1))
        assert optimizer is not None
        parts = {"model": model, "optimizer": optimizer}
        for step in range(3):
            if resumes and step < 2:
                continue
            if step == 2 and resumes:
                booster.load_checkpoint(folder, **parts, resume="must")
            elif step == 2:
                booster.save_checkpoint(folder, 2, **parts).wait()
            booster.backward(model(**next(share(booster, LLAMA, step))).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[each] for each in model.parameters()]
        found.append(
            [dict(state, weight=each) for state, each in zip(states, model.parameters(), strict=True)]
        )
    return found


def test_states_of_another_shape_are_saved_where_every_rank_has_them_whole(
    pool: Pool, tmp_path: Path
) -> None:
    for once, resumed in pool.run(2, go_on_with_factored_states, tmp_path):
        assert {"row_var", "col_var"} <= once[0].keys()
        for one, other in zip(once, resumed, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
