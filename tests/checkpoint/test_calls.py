"""Invalid calls, and calls that differ between ranks, raise one error on every rank; nothing is written."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from echelon.checkpoint.full_state import choose_step
from echelon.checkpoint.step_folders import begin_step, commit_step
from echelon.cluster.gathering import AgreedError, on_all_ranks, run_or_raise_together

from ..log_lines import logged
from ..pool import Pool
from .handmade import Handmade, small_config
from .runs import SHARD, Run, small_run

LOADING = "echelon.checkpoint.full_state"

# The objects of a run that each call takes; paths are relative to the test's folder.
PARTS = {
    "save_model": ("model",),
    "load_model": ("model",),
    "save_optimizer": ("optimizer",),
    "load_optimizer": ("optimizer",),
    "save_lr_scheduler": ("lr_scheduler",),
    "load_lr_scheduler": ("lr_scheduler",),
    "save_checkpoint": ("model", "optimizer", "lr_scheduler"),
    "load_checkpoint": ("model", "optimizer", "lr_scheduler"),
}
MODEL, OTHER, D = {"checkpoint": "m"}, {"checkpoint": "o"}, {"directory": ""}
USER = "`user` is saved once, and rank 1 gave other values than rank 0: give the same on every rank, or None on all but"
# A call, the arguments that differ on the second rank ("call" for another call), and the error on both.
DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "call": ("save_model", MODEL, {"call": "load_model"}, "the call is save_model on rank(s) [0] and load_model on"),
    "path": ("save_model", MODEL, OTHER, "/m' on rank(s) [0] and "),
    "value": ("save_model", MODEL | {"shard": True}, {"size_per_shard": 2}, "size_per_shard is 1024 on rank(s) [0]"),
    "parts": ("save_checkpoint", D | {"step": 0}, {"optimizer": None}, "optimizer is 'AdamW' on rank(s) [0] and None"),
    "resume": ("load_checkpoint", D | {"resume": 3}, {"resume": "auto"}, "resume is 3 on rank(s) [0] and 'auto' on"),
    "errors": ("save_model", MODEL, {"size_per_shard": 0}, "size_per_shard=0 must be a number of MiB, above 0 (rank 1"),
    "user": ("save_checkpoint", D | {"step": 0, "user": {"seen": 1}}, {"user": {"seen": 2}}, USER),
    "user of one": ("save_checkpoint", D | {"step": 0}, {"user": [2]}, USER),
}  # fmt: skip
NO_PATH = "must be a path: give a str that is not empty, or a pathlib.Path"
PLAIN = "cannot be saved: a checkpoint can contain only tensors and plain values"
NO_STATE = "which has no state_dict and load_state_dict"
# An invalid call, and its error.
IMPOSSIBLE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("save_model", {"checkpoint": ""}, f"checkpoint='' {NO_PATH}"),
    ("load_model", {"checkpoint": None}, f"checkpoint=None {NO_PATH}"),
    ("load_checkpoint", {"directory": 3}, f"directory=3 {NO_PATH}"),
    ("save_model", MODEL | {"shard": True, "prefix": "a/b"}, "prefix='a/b' must be letters, digits"),
    ("save_model", MODEL | {"prefix": "ema"}, "prefix='ema' is for the files of a folder: give shard=True"),
    ("save_model", MODEL | {"gather_dtensor": False}, "gather_dtensor=False is not available: leave it out"),
    ("save_optimizer", OTHER | {"shard": False}, "shard=False is not available: an optimizer is always"),
    ("load_optimizer", {"checkpoint": 0}, f"checkpoint=0 {NO_PATH}"),
    ("save_lr_scheduler", {"checkpoint": "", "lr_scheduler": 5}, f"lr_scheduler is 5, {NO_STATE}: give the scheduler"),
    ("save_lr_scheduler", {"checkpoint": "", "lr_scheduler": 5}, f"checkpoint='' {NO_PATH}"),
    ("load_lr_scheduler", MODEL | {"lr_scheduler": None}, f"lr_scheduler is None, {NO_STATE}"),
    ("save_checkpoint", D | {"step": -1}, "step=-1 must be an integer of at least 0"),
    ("save_checkpoint", D | {"step": "x"}, "step='x' must be an integer of at least 0"),
    ("save_checkpoint", D | {"step": 1, "keep_last": True}, "keep_last=True must be an integer of at least 1, or"),
    ("save_checkpoint", D | {"step": 1, "dataloader": 1}, f"dataloader is 1, {NO_STATE}: it does not know"),
    ("save_checkpoint", D | {"step": 1, "dataloader": [1]}, "dataloader is a list: give the one whose position"),
    ("load_checkpoint", D | {"resume": "newest"}, "resume='newest' must be"),
    ("save_checkpoint", D | {"step": 1, "user": {"a": print}}, f"`user` {PLAIN}"),
    ("save_checkpoint", D | {"step": 1, "user": Path("x")}, "but got pathlib"),
)  # fmt: skip


def make(run: Run, place: Path, name: str, options: dict[str, Any]) -> Any:
    arguments = {argument: run.everything[argument] for argument in PARTS[name]} | options
    for key in {"checkpoint", "directory"} & arguments.keys():
        if isinstance(arguments[key], str) and (arguments[key] or key == "directory"):
            arguments[key] = place / arguments[key]
    return getattr(run.booster, name)(**arguments)


def try_all(place: Path) -> dict[str, str]:
    run = small_run()
    run.booster.plugin.mesh.side_group()
    calls = {f"{number}": row[:2] for number, row in enumerate(IMPOSSIBLE)}
    for key, (name, options, change, _) in DIFFERENT.items():
        other = dict(options | (change if dist.get_rank() else {}))
        calls[key] = other.pop("call", name), other
    errors = {}
    for key, (name, options) in calls.items():
        with pytest.raises(ValueError) as caught:
            make(run, place, name, options)
        errors[key] = str(caught.value)
    dist.barrier()
    assert list(place.iterdir()) == []
    user = {"seen": 1} if dist.get_rank() == 0 else None
    run.booster.save_checkpoint(place, 3, **run.everything, user=user).wait()
    resumed = run.booster.load_checkpoint(str(place), **run.everything)
    assert resumed is not None and resumed.user == {"seen": 1}
    return errors


def test_calls_that_cannot_be_done_or_differ_are_reported_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    errors, other = pool.run(2, try_all, tmp_path)
    assert errors == other
    for key, (*_, expected) in DIFFERENT.items():
        assert expected in errors[key], f"{key}: {errors[key]}"
    for number, (name, options, expected) in enumerate(IMPOSSIBLE):
        assert expected in errors[f"{number}"], f"{name}({options}): {errors[f'{number}']}"
    assert "weights_only" not in str(errors)


def fail_on_the_last(kind: type[Exception]) -> list[int]:
    def work() -> int:
        if dist.get_rank() == 1:
            raise kind("the disk is full")
        return dist.get_rank()

    assert on_all_ranks(dist.get_rank, dist.group.WORLD) == [0, 1]
    return run_or_raise_together(work, dist.group.WORLD)


@pytest.mark.parametrize("kind", (OSError, FileNotFoundError, ValueError, KeyError))
def test_work_that_fails_on_one_rank_fails_on_all(pool: Pool, kind: type[Exception]) -> None:
    for error in pool.run_failing(2, fail_on_the_last, kind):
        assert type(error) is (AgreedError if kind is KeyError else kind)
        assert "the disk is full" in str(error) and "(rank 1)" in str(error)


def save_with_prefixes(place: Path) -> None:
    run = small_run()
    saved = []
    for number, prefix in enumerate((None, "ema", "ema")):
        run.step(number)
        run.booster.save_model(run.model, place, shard=True, size_per_shard=SHARD, prefix=prefix)
        saved.append(run.unsharded())
    for name, expected in (("", saved[0]), ("ema.model.safetensors.index.json", saved[2])):
        run.booster.load_model(run.model, place / name)
        loaded = run.unsharded()
        assert all(torch.equal(loaded[key], expected[key]) for key in loaded if "/" not in key)


def test_a_prefix_names_the_files_of_a_model_beside_others(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_with_prefixes, tmp_path)
    names = {path.name for path in tmp_path.glob("*model*")}
    with_prefix = {name for name in names if name.startswith("ema.")}
    assert {name.removeprefix("ema.") for name in with_prefix} == names - with_prefix


# The choice of the step to resume from.


def choose(directory: Path) -> dict[str, Any]:
    """Return the chosen step or the error, and the log, for folders of several kinds."""
    group = dist.group.WORLD
    assert group is not None
    outcomes: dict[str, Any] = {}
    step = directory / "damaged" / "step-00000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (directory / "file").touch()
    with logged(LOADING) as lines:
        for name in ("none", "damaged/.."):
            assert choose_step(directory / name, "auto", group) is None
    outcomes["none"] = lines
    for key, path, resume in (
        ("of a step", step, "auto"),
        ("a number of a step", step, 3),
        ("above", directory, None),
        ("a file", directory / "file", "auto"),
        ("damaged", step, None),
        ("must", directory / "none", "must"),
        ("another", directory / "damaged", 4),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            choose_step(path, resume, group)  # type: ignore[arg-type]
        outcomes[key] = str(error.value)
    for save, wish in ((6, "auto"), (12, 6), (9, "auto"), (None, 12), (None, 9)):
        runs = directory / "runs"
        if save is not None:
            commit_step(begin_step(runs, save), runs, save, {})
        with logged(LOADING) as lines:
            path = choose_step(runs, wish, group)  # type: ignore[arg-type]
        assert path is not None
        outcomes[f"{save} {wish}"] = (path.name, "".join(lines))
    return outcomes


def test_a_run_resumes_from_the_newest_step_and_names_later_ones(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.run(1, choose, tmp_path)[0]
    whys = ("which does not exist", "which has no folder step-…")
    for line, why in zip(outcomes["none"], whys, strict=True):
        assert line.startswith("no checkpoint in ") and f"{why}: the run starts from scratch" in line
    advice = f"step-00000003 is the folder of a step: give {tmp_path / 'damaged'}, that of all"
    assert advice in outcomes["of a step"] and advice in outcomes["a number of a step"]
    assert "is refused" in outcomes["above"] and "Remove" not in outcomes["above"]
    assert "file is a file: give a folder" in outcomes["a file"]
    assert "cannot be read, it is damaged" in outcomes["damaged"] and "Remove" not in outcomes["damaged"]
    assert f"no checkpoint in {tmp_path / 'none'}" in outcomes["must"]
    assert 'or resume="auto"' in outcomes["must"]
    assert "beside it there are step-00000003" in outcomes["another"]
    assert (outcomes["6 auto"], outcomes["None 12"]) == (("step-00000006", ""), ("step-00000012", ""))
    behind = "although there are later steps: step-00000012. They are kept"
    for key, number in (("12 6", 6), ("9 auto", 9), ("None 9", 9)):
        assert outcomes[key][0] == f"step-0000000{number}" and behind in outcomes[key][1]


def chosen(directory: Path, step: Path) -> list[str]:
    """Return the errors if the last rank may not read a step, and if it does not see it."""
    group, is_last = dist.group.WORLD, dist.get_rank() == dist.get_world_size() - 1
    assert group is not None
    errors = []
    not_read = mock.patch(f"{LOADING}.manifest_of", side_effect=PermissionError(13, "not for you"))
    not_seen = mock.patch.object(Path, "is_dir", lambda path: path != step)
    for harm in (not_read, not_seen):
        with harm if is_last else mock.MagicMock(), pytest.raises(OSError) as error:
            # An error of all ranks: the first rank alone has found the step.
            choose_step(directory, "auto", group)
        errors.append(str(error.value))
    return errors


def test_a_step_that_a_rank_may_not_read_or_does_not_see_is_no_damage(pool: Pool, tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    for made.step in (1, 2):
        newer = made.write(tmp_path)
    for not_read, not_seen in pool.run(2, chosen, tmp_path, newer):
        assert "not for you" in not_read and "step-00000002, which may be intact" in not_read
        assert not_read.endswith("(rank 1)") and "Remove" not in not_read
        words = "is not visible on this rank: load from a file system that all machines"
        assert not_seen.startswith(f"{newer} {words}")
