"""Saving and loading depend neither on where a process is nor on what it does besides."""

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin, TorchDDPPlugin
from echelon.checkpoint.model import SAFETENSORS, describing

from ..pool import Pool
from .handmade import small_config
from .runs import SHARD, Run, small_run


def weights_differ(run: Run, place: Path, name: str, before: dict[str, torch.Tensor]) -> bool:
    run.booster.load_model(run.model, place / name)
    return any(not torch.equal(each, before[key]) for key, each in run.whole().items() if "/" not in key)


def save_and_go_elsewhere(place: Path) -> None:
    run, home = small_run(), os.getcwd()
    run.step(0)
    try:
        saves = []
        for save in (
            lambda: run.booster.save_checkpoint("steps", 1, **run.everything, use_async=True),
            lambda: run.booster.save_model(run.model, "model", shard=True, use_async=True),
            lambda: run.booster.save_optimizer(run.optimizer, "optimizer", use_async=True),
        ):
            os.chdir(place)
            saves.append(save())
            os.chdir(home)
            saves[-1].wait()
    finally:
        os.chdir(home)
    assert sorted(os.listdir(place)) == ["model", "optimizer", "steps"]
    assert [save.path.parent for save in saves] == [place] * 3


def test_a_run_may_change_its_folder_while_it_saves(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_and_go_elsewhere, tmp_path)


def save_and_load_on_another_default_device(place: Path) -> None:
    """Meta, on which nothing can be kept, for the GPU that scripts set."""
    run = small_run()
    run.step(0)
    before = run.whole()
    torch.set_default_device("meta")
    try:
        for use_async in (False, True):
            run.booster.save_checkpoint(place, 1, **run.everything, use_async=use_async).wait()
        run.booster.save_model(run.model, place / "m.bin", use_safetensors=False)
        for weight in run.model.parameters():
            weight.detach().zero_()
        run.booster.load_checkpoint(place, **run.everything)
        run.booster.load_model(run.model, place / "m.bin")
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(each, before[name]) for name, each in run.whole().items())


def test_the_default_device_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_and_load_on_another_default_device, tmp_path)


def save_two_models_at_once(place: Path) -> None:
    """Two boosters of a process, whose saves run beside each other."""
    runs = {"a": small_run(seed=1), "b": small_run(seed=2)}
    wholes = {name: run.whole() for name, run in runs.items()}
    for number in range(8):
        saves = [
            run.booster.save_model(
                run.model, place / "m", shard=True, prefix=name, use_async=True, size_per_shard=SHARD
            )
            for name, run in runs.items()
        ]
        saves += [
            run.booster.save_checkpoint(place / name, number, model=run.model, use_async=True)
            for name, run in runs.items()
        ]
        for save in saves:
            save.wait()
    for name, run in runs.items():
        for path in (f"m/{name}.model.safetensors.index.json", f"{name}/step-00000007/model"):
            assert not weights_differ(run, place, path, wholes[name])
    dist.barrier()
    assert [name for name in os.listdir(place / "m") if name.startswith(".")] == []


def test_two_boosters_of_a_process_save_beside_each_other(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_two_models_at_once, tmp_path)


def save_beside_a_moved_step(place: Path) -> None:
    run = small_run()
    run.booster.save_checkpoint(place / "c", 1, **run.everything)
    if dist.get_rank() == 0:
        (place / "c" / "step-00000001").rename(place / "moved")
        (place / "c" / "step-00000001").symlink_to(place / "moved")
    run.booster.save_checkpoint(place / "c", 2, **run.everything, keep_last=1)
    assert os.listdir(place / "c") == ["step-00000002"]
    assert (place / "moved" / "manifest.json").exists()


def test_of_a_step_that_was_moved_the_link_alone_is_removed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_beside_a_moved_step, tmp_path)


class Remembering(nn.Module):
    """A model with a state that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError("nobody asked for it")


def refuse_an_extra_state() -> None:
    for plugin in (HybridParallelPlugin(precision="fp32"), TorchDDPPlugin()):
        with pytest.raises(ValueError, match=r"^0\._extra_state cannot be saved or loaded: .* Make a buffer"):
            Booster(plugin=plugin).boost(nn.Sequential(Remembering()))


def test_a_state_that_would_be_lost_is_refused(pool: Pool) -> None:
    pool.run(1, refuse_an_extra_state)


def save_without_room_for_temporary_files(place: Path) -> None:
    run = small_run()
    run.step(0)
    with patch.object(tempfile, "tempdir", str(place / "none")):
        with pytest.raises(OSError):
            tempfile.mkdtemp()
        run.booster.save_checkpoint(place, 1, **run.everything).wait()
        run.booster.save_model(run.model, place / "m", shard=True)
        before = run.whole()
        run.step(1)
        for load in (
            lambda: run.booster.load_model(run.model, place / "m"),
            lambda: run.booster.load_checkpoint(place, **run.everything),
        ):
            load()
            assert torch.equal(run.whole()["model.norm.weight"], before["model.norm.weight"])
    assert run.whole().keys() == before.keys()


def test_the_system_needs_no_room_for_temporary_files(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_without_room_for_temporary_files, tmp_path)
    for folder in (tmp_path / "m", tmp_path / "step-00000001" / "model"):
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.json", "generation_config.json", SAFETENSORS.one}
        LlamaForCausalLM.from_pretrained(folder)


def test_settings_of_generation_that_contradict_each_other_end_no_run(tmp_path: Path) -> None:
    model = LlamaForCausalLM(small_config())
    model.generation_config.temperature = 0.5  # without sampling: transformers would refuse to save it
    describe = describing(model)
    assert describe is not None
    describe(torch.bfloat16, tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    assert read.temperature == 0.5
    assert read.eos_token_id == model.generation_config.eos_token_id == 2
