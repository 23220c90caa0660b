"""What describes a model is written as it is, beside files that other ranks still write, and touches none of them."""

import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaForCausalLM

from echelon.checkpoint.exchange import Assembled, offers_of
from echelon.checkpoint.local import local_piece
from echelon.checkpoint.model import SAFETENSORS, Records, _Output, describing, plan_model

from ..pool import Pool
from .handmade import small_config
from .runs import small_run

NAMES = ("a", "b", "c", "d", "e")  # each a file; the second rank has the last one
CONFIG = "config.json"


def tensor(name: str) -> torch.Tensor:
    return torch.arange(64.0) + ord(name)


def write_late(folder: Path) -> Records:
    """A model whose config the first rank writes while the second one is in the middle of its last file."""
    group = dist.group.WORLD
    assert group is not None
    begun, described = folder.parent / "begun", folder.parent / "described"

    def describe(_: torch.dtype, where: Path) -> None:
        begun.touch()
        await_file(described)
        (where / CONFIG).write_text("{}")

    write = _Output._write

    def late(self: _Output, each: Assembled) -> None:
        if group.rank() == 1 and each.name == LATE:
            await_file(begun)
            write(self, each)
            described.touch()
        else:
            write(self, each)

    held = {name: local_piece(name, tensor(name), None, 0) for name in NAMES}
    every = [offers_of(held)] * 2
    files = plan_model(held, every, NAMES, SAFETENSORS, max_bytes=1, describe=describe, group=group)
    LATE = [written.entry.name for plan in files.plans if plan.writer == 1 for written in plan.tensors][-1]
    _Output._write = late  # type: ignore[method-assign]
    try:
        return files.write(folder)
    finally:
        _Output._write = write  # type: ignore[method-assign]


def await_file(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def test_files_that_appear_while_a_model_is_described_are_left_to_their_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    first, second = pool.run(2, write_late, folder)
    assert CONFIG in first and not first.keys() & second.keys()
    assert {path.name for path in folder.iterdir()} == first.keys() | second.keys()
    for name in NAMES:
        path = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
        assert torch.equal(load_file(path)[name], tensor(name))


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
        assert names == {CONFIG, "generation_config.json", SAFETENSORS.one}
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
