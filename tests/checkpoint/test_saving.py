"""Asynchronous saves run during training, contain the state at their call, and depend on no global settings."""

import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin
from echelon.checkpoint import background, commit, step_folders
from echelon.checkpoint.background import Copies, Saver
from echelon.checkpoint.model import describing
from echelon.cluster.errors import RankFailure
from echelon.verify.model_choice import ModelChoice

from ..log_lines import logged
from ..pool import Pool, RankDied
from ..registered_memory import registered_memory
from .failures import at_every_write, kill_rank_at
from .handmade import small_config
from .runs import SHARD, Run, config_of, small_run

PATH = Path("somewhere")
MIXTRAL = ModelChoice(model_type="mixtral")


def full() -> None:
    raise OSError("no space left")


def test_a_save_begins_when_the_previous_one_has_ended() -> None:
    saver, order, may_end = Saver(), [], threading.Event()

    def slow() -> None:
        may_end.wait()
        order.append("first")

    first = saver.run(slow, PATH, use_async=True)
    assert not first.done
    threading.Timer(0.05, may_end.set).start()
    saver.run(lambda: order.append("second"), PATH, use_async=True).wait()
    assert order == ["first", "second"] and first.done


def test_a_failure_is_reported_and_kept_if_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver()
    with patch("torch.distributed.get_rank", return_value=0), caplog.at_level(logging.ERROR):
        save = saver.run(full, PATH, use_async=True)
        with pytest.raises(OSError, match="no space left"):
            save.wait()
        assert isinstance(saver.run(full, PATH, is_reporting=True).failure, OSError)
        assert saver.run(lambda: None, PATH, is_reporting=True).failure is None
        with pytest.raises(OSError):
            saver.run(full, PATH)
    assert caplog.text.count("saving to somewhere failed: no space left") == 2


def save_beside_one_that_is_killed(directory: Path) -> None:
    """Rank 1 is killed when the thread of its save first writes, so that the others lose it in a collective."""
    run = small_run()
    with at_every_write(directory, kill_rank_at(1, 1)), logged("echelon.checkpoint.background") as lines:
        options = {"size_per_shard": SHARD, "use_async": True}
        save = run.booster.save_checkpoint(directory, 1, **run.everything, **options)
        try:
            save.wait()
        finally:
            (line,) = lines
            assert line.startswith(f"saving to {directory} failed: rank 1 died: ")


def test_waiting_for_a_save_names_the_rank_that_was_killed_meanwhile(pool: Pool, tmp_path: Path) -> None:
    errors = pool.run_failing(3, save_beside_one_that_is_killed, tmp_path)
    assert isinstance(errors[1], RankDied)
    for rank in (0, 2):
        error = errors[rank]
        assert isinstance(error, RankFailure) and error.rank == 1, error
        waiting = f"this rank ({rank}) was waiting for it in the save to {tmp_path}"
        assert str(error).startswith(f"rank 1 died: its process is gone; {waiting}")
        assert "RuntimeError: " in str(error.__cause__)  # the backend's


def tensors(seed: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 3, generator=drawn),
        torch.randn(7, 4, generator=drawn).t(),  # not contiguous
        torch.tensor(3.0),
        torch.randn(3, generator=drawn).bfloat16(),
        torch.empty(0, 2),
        torch.randn(2**24 + 1, generator=drawn),  # larger than a chunk
        torch.randn(9, generator=drawn).double(),
    ]


def test_copies_stay_as_they_were_and_their_memory_is_used_again() -> None:
    copies = Copies(torch.device("cpu"))
    sizes = []
    for seed in range(3):
        live = tensors(seed)
        with copies.keeping() as keep:
            copied = [keep(tensor) for tensor in live]
        for tensor in live:
            tensor.fill_(-1.0)
        for copy, expected in zip(copied, tensors(seed), strict=True):
            assert torch.equal(copy, expected) and copy.is_contiguous() and copy.dtype == expected.dtype
        sizes.append(sum(chunk.nbytes for chunk in copies._chunks))
    assert sizes[0] == sizes[1] == sizes[2] == 2**26 + 4 + 2 * 2**20


def test_large_copies_have_exactly_their_bytes_and_a_save_of_others_takes_their_place() -> None:
    sizes, longer = [3 * 2**20, 5 * 2**20 + 1], [4 * 2**20, 2**20 + 9]
    with registered_memory(background) as registered:
        copies = Copies(torch.device("cpu"))
        for lengths in (sizes, longer, sizes, longer, sizes):
            with copies.keeping() as keep:
                for size in lengths:
                    keep(torch.empty(size, dtype=torch.uint8))
        assert sorted(registered.sizes.values()) == [longer[0], sizes[1]]
        del copies, keep


def rates_of(run: Run) -> list[float]:
    return [float(group["lr"]) for group in run.optimizer.param_groups]


def save_two_beside_training(directory: Path) -> None:
    """Save twice asynchronously: nothing is written before the next step, and the second save waits for the first."""
    run = small_run()
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])  # a tensor, which the scheduler changes in place
    may_write = threading.Event()
    saved, rates, saves = [], [], []
    options: dict[str, Any] = {"size_per_shard": SHARD, "use_async": True}
    with at_every_write(directory, lambda number, what: may_write.wait(30) and None):
        for step in (1, 2):
            run.step(step)
            saved.append(run.unsharded())
            rates.append(rates_of(run))
            saves.append(run.booster.save_checkpoint(directory, step, **run.everything, **options))
            run.step(10 + step)
            if step == 1:
                assert not saves[0].done
                threading.Timer(0.2, may_write.set).start()
        for save in saves:
            save.wait()
    for step, expected in enumerate(saved, start=1):
        dist.barrier()
        run.booster.load_checkpoint(directory, **run.everything, resume=step)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in run.unsharded().items()), step
        assert rates_of(run) == rates[step - 1]
    assert rates[0] != rates[1]
    assert not torch.equal(saved[0]["model.norm.weight"], saved[1]["model.norm.weight"])


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


def save_and_load_on_another_default_device(place: Path) -> None:
    """Save and load with the meta device as default, in place of a GPU that scripts set."""
    run = small_run()
    run.step(0)
    before = run.unsharded()
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
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.unsharded().items())


def save_two_models_at_once(place: Path) -> None:
    """Save with two boosters of one process at the same time."""
    runs = {"a": small_run(seed=1), "b": small_run(seed=2)}
    saved = {name: run.unsharded() for name, run in runs.items()}
    options: dict[str, Any] = {"shard": True, "use_async": True, "size_per_shard": SHARD}
    for number in range(8):
        saves = [
            run.booster.save_model(run.model, place / "m", prefix=name, **options)
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
            run.booster.load_model(run.model, place / path)
            weights = {key: tensor for key, tensor in run.unsharded().items() if "/" not in key}
            assert all(torch.equal(weight, saved[name][key]) for key, weight in weights.items())
    dist.barrier()
    assert [name for name in os.listdir(place / "m") if name.startswith(".")] == []
    names = {path.name for path in (place / "m").glob("*model*")}
    assert {name.removeprefix("a.") for name in names} >= {name[2:] for name in names if name[0] == "b"}


def use_a_second_booster(place: Path) -> None:
    """Save in a thread that is slow, and use the same place by a booster with another plugin."""
    one, other = small_run(), small_run(seed=7)
    expected = one.unsharded()
    where = place / "linked"
    if dist.get_rank() == 0:
        (place / "folder").mkdir()
        where.symlink_to("folder")
    dist.barrier()

    def is_loaded(what: str = "/") -> bool:
        tensors = other.unsharded()
        names = [name for name in tensors if name.startswith(what) or "/" not in name]
        return all(torch.equal(tensors[name], expected[name]) for name in names)

    with slow_commits(0.4):
        save = one.booster.save_checkpoint(place / "folder" / "steps", 1, **one.everything, use_async=True)
        resumed = other.booster.load_checkpoint(where / "steps", **other.everything)
        assert resumed is not None and resumed.step == 1 and save.done and is_loaded()
        # A save waits, too: the step of the first run is there when the second one counts.
        save = one.booster.save_checkpoint(place / "folder" / "steps", 2, **one.everything, use_async=True)
        other.booster.save_checkpoint(where / "steps", 3, **other.everything, keep_last=2)
        assert save.done and sorted(os.listdir(where / "steps")) == ["step-00000002", "step-00000003"]
        one.step(0)
        expected = one.unsharded()
        save = one.booster.save_model(one.model, place / "model", shard=True, use_async=True)
        other.booster.load_model(other.model, where.parent / "model")
        assert save.done and is_loaded()
        save = one.booster.save_optimizer(one.optimizer, place / "optimizer", use_async=True)
        other.booster.load_optimizer(other.optimizer, place / "optimizer")
        assert save.done and is_loaded("exp_avg/")
    with slow_commits(30.0) as now:  # a save elsewhere is not waited for
        save = one.booster.save_checkpoint(place / "folder" / "steps", 4, **one.everything, use_async=True)
        other.booster.save_lr_scheduler(other.scheduler, place / "scheduler.pt")
        assert not save.done
        now.set()
        save.wait()


@contextmanager
def slow_commits(seconds: float) -> Iterator[threading.Event]:
    """Delay the end of every save, until the event if that is earlier."""
    now = threading.Event()

    def later(original: Callable[..., Any], *args: Any) -> Any:
        now.wait(seconds)
        return original(*args)

    with (
        patch.object(step_folders, "commit_step", partial(later, step_folders.commit_step)),
        patch.object(commit, "_commit", partial(later, commit._commit)),
    ):
        yield now


def save_beside_a_moved_step(place: Path) -> None:
    """Save beside a step that was moved and linked: only the link is removed."""
    run = small_run()
    run.booster.save_checkpoint(place / "c", 1, **run.everything)
    if dist.get_rank() == 0:
        (place / "c" / "step-00000001").rename(place / "moved")
        (place / "c" / "step-00000001").symlink_to(place / "moved")
    run.booster.save_checkpoint(place / "c", 2, **run.everything, keep_last=1)
    assert os.listdir(place / "c") == ["step-00000002"]
    assert (place / "moved" / "manifest.json").exists()


def save_without_room_for_temporary_files(place: Path) -> None:
    run = small_run()
    run.step(0)
    before = run.unsharded()
    with patch.object(tempfile, "tempdir", str(place / "none")):
        with pytest.raises(OSError):
            tempfile.mkdtemp()
        run.booster.save_checkpoint(place, 1, **run.everything).wait()
        run.booster.save_model(run.model, place / "m", shard=True)
        run.step(1)
        run.booster.load_model(run.model, place / "m")
    assert torch.equal(run.unsharded()["model.norm.weight"], before["model.norm.weight"])
    for folder in (place / "m", place / "step-00000001" / "model"):
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors"}
        LlamaForCausalLM.from_pretrained(folder)


def train_after_loading_for_inference(directory: Path) -> None:
    run = small_run()
    run.step(0)
    run.booster.save_checkpoint(directory, 1, **run.everything).wait()
    before = run.step(1)
    with torch.inference_mode():
        run.booster.load_checkpoint(directory, **run.everything)
    assert run.step(1) == before


@pytest.mark.parametrize(
    "check",
    [
        save_two_beside_training,
        save_and_go_elsewhere,
        save_and_load_on_another_default_device,
        pytest.param(save_two_models_at_once, marks=pytest.mark.slow),
        use_a_second_booster,
        save_beside_a_moved_step,
        save_without_room_for_temporary_files,
        train_after_loading_for_inference,
    ],
    ids=lambda check: check.__name__,
)
def test_saving_and_loading_depend_on_no_global_settings(
    pool: Pool, tmp_path: Path, check: Callable[[Path], None]
) -> None:
    pool.run(2, check, tmp_path)


def test_contradictory_generation_settings_do_not_end_a_run(tmp_path: Path) -> None:
    model = LlamaForCausalLM(small_config())
    model.generation_config.temperature = 0.5  # without sampling: transformers would refuse to save it
    describe = describing(model)
    assert describe is not None
    describe(torch.bfloat16, tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    assert (read.temperature, read.eos_token_id) == (0.5, 2)


CODE = {
    "__init__": "",
    "configuration": "from transformers import LlamaConfig\nclass OneConfig(LlamaConfig):\n    model_type = 'one'",
    "modeling": "from transformers import LlamaForCausalLM\nfrom .configuration import OneConfig\n"
    "class OneForCausalLM(LlamaForCausalLM):\n    config_class = OneConfig",
}


@pytest.mark.parametrize("is_fsdp", [False, True])
def test_code_of_a_checkpoint_is_saved_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fsdp: bool
) -> None:
    package = tmp_path / f"code_of_checkpoint_{is_fsdp}"
    package.mkdir()
    for name, text in CODE.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = import_module(f"{package.name}.modeling").OneForCausalLM
    kind.register_for_auto_class("AutoModelForCausalLM")  # as from_pretrained with trust_remote_code does
    kind.config_class.register_for_auto_class()
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    model = kind(kind.config_class(num_hidden_layers=1, **sizes))
    if is_fsdp:
        model.__class__ = type("FSDPOneForCausalLM", (kind,), {})  # as fully_shard does
    describe = describing(model)
    assert describe is not None
    (tmp_path / "saved").mkdir()
    describe(torch.float32, tmp_path / "saved")
    names = {"configuration.py", "modeling.py", "config.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == names
    classes = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    automatic = {"AutoConfig": "configuration.OneConfig", "AutoModelForCausalLM": "modeling.OneForCausalLM"}
    assert classes == automatic


def save_a_step(directory: Path) -> dict[str, Tensor]:
    run = Run(config_of(), tp_size=2, pp_size=2, precision="bf16")
    run.step(0)
    run.booster.save_checkpoint(directory, 3, **run.everything).wait()
    return run.unsharded()


def loaded_completely(folder: Path) -> Any:
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def test_from_pretrained_reads_what_was_saved(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(4, save_a_step, tmp_path)[0]
    model = loaded_completely(tmp_path / "step-00000003" / "model")
    assert model.dtype is torch.bfloat16
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())


def save_mixtral(path: Path) -> Tensor:
    """Save a model with experts under tensor parallelism, and return its logits."""
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model = booster.boost(MIXTRAL.build(seed=3))[0].eval()
    booster.save_model(model, path, shard=path.suffix == "", size_per_shard=0.01)
    with torch.no_grad():
        logits = model(torch.arange(12).view(1, 12)).logits
    return logits.gather() if hasattr(logits, "gather") and hasattr(logits, "local") else logits


@pytest.mark.parametrize("shard", (pytest.param(False, marks=pytest.mark.slow), True))
def test_experts_saved_from_shards_load_by_from_pretrained(pool: Pool, tmp_path: Path, shard: bool) -> None:
    path = tmp_path / "model" if shard else tmp_path / "model" / "model.safetensors"
    logits = pool.run(2, save_mixtral, path)[0]
    if not shard:
        MIXTRAL.config().save_pretrained(path.parent)
    model = loaded_completely(tmp_path / "model").eval()
    assert torch.allclose(model(torch.arange(12).view(1, 12)).logits, logits, atol=1e-5)
