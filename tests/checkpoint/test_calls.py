"""Calls that cannot be done, or that ranks do not make alike, are one error on every rank; nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from ..pool import Pool
from .runs import SHARD, Run, small_run

Call = Callable[[Run, Path], Any]

# What the first rank does, what the others do, and what is reported of each.
DIFFERENT: dict[str, tuple[Call, Call, str, str]] = {
    "save or load": (
        lambda run, place: run.booster.save_model(run.model, place / "m"),
        lambda run, place: run.booster.load_model(run.model, place / "m"),
        "the call is save_model on rank(s) [0]",
        "and load_model on rank(s) [1]",
    ),
    "path": (
        lambda run, place: run.booster.save_model(run.model, place / "a"),
        lambda run, place: run.booster.save_model(run.model, place / "b"),
        "/a'",
        "/b'",
    ),
    "shard": (
        lambda run, place: run.booster.save_model(run.model, place / "a", shard=True),
        lambda run, place: run.booster.save_model(run.model, place / "a"),
        "shard is True on rank(s) [0]",
        "False on rank(s) [1]",
    ),
    "size": (
        lambda run, place: run.booster.save_model(run.model, place / "a", shard=True, size_per_shard=1),
        lambda run, place: run.booster.save_model(run.model, place / "a", shard=True, size_per_shard=2),
        "size_per_shard is 1 on",
        "2 on rank(s) [1]",
    ),
    "use_async": (
        lambda run, place: run.booster.save_optimizer(run.optimizer, place / "o", use_async=True),
        lambda run, place: run.booster.save_optimizer(run.optimizer, place / "o"),
        "use_async is True",
        "False on rank(s) [1]",
    ),
    "step": (
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything),
        lambda run, place: run.booster.save_checkpoint(place, 1, **run.everything),
        "step is 0",
        "1 on rank(s) [1]",
    ),
    "parts": (
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything),
        lambda run, place: run.booster.save_checkpoint(place, 0, model=run.model),
        "optimizer is 'AdamW' on rank(s) [0] and None on",
        "lr_scheduler is 'LambdaLR' on rank(s) [0] and None on",
    ),
    "keep_last": (
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything, keep_last=1),
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything),
        "keep_last is 1",
        "None on rank(s) [1]",
    ),
    "resume": (
        lambda run, place: run.booster.load_checkpoint(place, **run.everything, resume=3),
        lambda run, place: run.booster.load_checkpoint(place, **run.everything),
        "resume is 3",
        "'auto' on rank(s) [1]",
    ),
    "faults of one rank": (
        lambda run, place: run.booster.save_model(run.model, place / "m", size_per_shard=0),
        lambda run, place: run.booster.save_model(run.model, place / "m"),
        "size_per_shard=0 must be a number of MiB, above 0",
        "(rank 0)",
    ),
    "user": (
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything, user={"seen": 1}),
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything, user={"seen": 2}),
        "`user` is saved once, and rank 1 gave other values than rank 0",
        "or None on all but the first",
    ),
    "user of another rank alone": (
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything),
        lambda run, place: run.booster.save_checkpoint(place, 0, **run.everything, user=[2]),
        "`user` is saved once, and rank 1 gave other values than rank 0",
        "or None on all but the first",
    ),
}
NO_PATH = "must be a path, a text that is not empty or a pathlib.Path: give one"
# What cannot be done, and what is told.
IMPOSSIBLE: dict[str, tuple[Call, str]] = {
    "no path for a model": (
        lambda run, place: run.booster.save_model(run.model, ""),
        f"checkpoint='' {NO_PATH}",
    ),
    "a model from nowhere": (lambda run, place: run.booster.load_model(run.model, None), f"=None {NO_PATH}"),
    "a number for a folder": (
        lambda run, place: run.booster.load_checkpoint(3, **run.everything),
        f"directory=3 {NO_PATH}",
    ),
    "a prefix that is a folder": (
        lambda run, place: run.booster.save_model(run.model, place / "m", shard=True, prefix="a/b"),
        "prefix='a/b' must be letters, digits",
    ),
    "a prefix of one file": (
        lambda run, place: run.booster.save_model(run.model, place / "m", prefix="ema"),
        "prefix='ema' is for the files of a folder: give shard=True",
    ),
    "pieces of a model": (
        lambda run, place: run.booster.save_model(run.model, place / "m", gather_dtensor=False),
        "gather_dtensor=False is not offered, since files hold whole tensors",
    ),
    "an optimizer in one file": (
        lambda run, place: run.booster.save_optimizer(run.optimizer, place / "o", shard=False),
        "shard=False: an optimizer is saved as a folder",
    ),
    "an optimizer to nowhere": (
        lambda run, place: run.booster.save_optimizer(run.optimizer, None),
        f"checkpoint=None {NO_PATH}",
    ),
    "an optimizer from a number": (
        lambda run, place: run.booster.load_optimizer(run.optimizer, 0),
        f"checkpoint=0 {NO_PATH}",
    ),
    "no scheduler and no path": (
        lambda run, place: run.booster.save_lr_scheduler(5, ""),
        f"lr_scheduler is 5, which has no state_dict and load_state_dict: give the scheduler that booster.boost "
        f"returned; checkpoint='' {NO_PATH}",
    ),
    "a scheduler that is none": (
        lambda run, place: run.booster.load_lr_scheduler(None, place / "s.pt"),
        "lr_scheduler is None, which has no state_dict",
    ),
    "a step with parts that are none": (
        lambda run, place: run.booster.save_checkpoint(
            place, -1, model=run.model, lr_scheduler=place, dataloader=[1], keep_last=0
        ),
        "step=-1 must be a whole number, at least 0; lr_scheduler is a PosixPath, which has no state_dict and "
        "load_state_dict: give the scheduler that booster.boost returned; dataloader is a list, which has",
    ),
    "a step that is a word": (
        lambda run, place: run.booster.save_checkpoint(place, "x", model=run.model, keep_last=True),
        "step='x' must be a whole number, at least 0; keep_last=True must be a whole number, at least 1, or None to",
    ),
    "keep_last below": (
        lambda run, place: run.booster.save_checkpoint(place, 1, model=run.model, keep_last=-1),
        "keep_last=-1 must be a whole number",
    ),
    "a step to go on from": (
        lambda run, place: run.booster.load_checkpoint(place, **run.everything, resume="newest"),
        "resume='newest' must be",
    ),
    "user values that run code": (
        lambda run, place: run.booster.save_checkpoint(place, 1, model=run.model, user={"a": lambda: 3}),
        "`user` cannot be saved: a checkpoint holds plain values and tensors alone",
    ),
}


def tried(call: Call, run: Run, place: Path) -> str:
    with pytest.raises(ValueError) as caught:
        call(run, place)
    return str(caught.value)


def try_all(place: Path) -> dict[str, str]:
    run = small_run()
    run.booster.plugin.mesh.side_group()
    told = {name: tried(row[min(dist.get_rank(), 1)], run, place) for name, row in DIFFERENT.items()}
    told |= {name: tried(call, run, place) for name, (call, _) in IMPOSSIBLE.items()}
    dist.barrier()
    assert list(place.iterdir()) == []
    user = {"seen": 1} if dist.get_rank() == 0 else None
    run.booster.save_checkpoint(place, 3, **run.everything, user=user).wait()
    resumed = run.booster.load_checkpoint(str(place), **run.everything)
    assert resumed is not None and resumed.user == {"seen": 1}
    return told


def test_calls_that_cannot_be_done_or_differ_are_told_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    told, other = pool.run(2, try_all, tmp_path)
    assert told == other
    for name, (*_, first, second) in DIFFERENT.items():
        assert first in told[name] and second in told[name], f"{name}: {told[name]}"
    for name in ("step", "path", "resume", "parts"):
        assert "every rank has to make the same call" in told[name]
    for name, (_, expected) in IMPOSSIBLE.items():
        one_line = told[name].replace("\n- ", "; ")
        assert expected in one_line, f"{name}: {told[name]}"


def save_with_prefixes(place: Path) -> None:
    run = small_run()
    wholes = []
    for number, prefix in enumerate((None, "ema", "ema")):
        run.step(number)
        run.booster.save_model(
            run.model, place, shard=True, size_per_shard=SHARD, prefix=prefix, gather_dtensor=True
        )
        wholes.append(run.whole())
    for name, expected in (("", wholes[0]), ("ema.model.safetensors.index.json", wholes[2])):
        run.booster.load_model(run.model, place / name)
        found = run.whole()
        assert all(torch.equal(found[each], expected[each]) for each in found if "/" not in each)
    run.booster.save_optimizer(run.optimizer, place / "o", shard=True)


def test_a_prefix_names_the_files_of_a_model_beside_others(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_with_prefixes, tmp_path)
    names = {path.name for path in tmp_path.glob("*model*")}
    assert {name.removeprefix("ema.") for name in names if name.startswith("ema.")} == {
        name for name in names if not name.startswith("ema.")
    }
    assert not LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"]
