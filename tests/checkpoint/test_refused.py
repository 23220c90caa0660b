"""What cannot be saved or gone on from is refused in words that help, before anything has changed."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

from echelon.checkpoint.dcp import _Writer
from echelon.checkpoint.model import write_model_file
from echelon.checkpoint.step import choose_step, scheduler_errors
from echelon.checkpoint.steps import begin_step, commit_step
from echelon.checkpoint.tensor_file import saved_bytes

from ..pool import Pool
from .runs import small_run

MAKERS: dict[str, Any] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=4),
    "step": lambda optimizer: StepLR(optimizer, 2),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    "plateau": ReduceLROnPlateau,
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize("saved", MAKERS)
@pytest.mark.parametrize("loading", MAKERS)
def test_a_scheduler_takes_the_state_of_its_own_kind_alone(saved: str, loading: str) -> None:
    state = MAKERS[saved](optimizer()).state_dict()
    faults = scheduler_errors(MAKERS[loading](optimizer()), state, "FILE")
    assert bool(faults) == (saved != loading)
    assert all(each.startswith("FILE is no state of a ") for each in faults)


def test_weights_are_no_state_of_a_scheduler() -> None:
    scheduler = ExponentialLR(optimizer(), 0.9)
    (fault,) = scheduler_errors(scheduler, {"a.weight": torch.zeros(2)}, "FILE")
    assert fault.startswith("FILE is no state of a ExponentialLR: it lacks ") and "gamma" in fault
    assert scheduler_errors(scheduler, torch.zeros(2), "FILE")


@pytest.mark.parametrize(("value", "told"), ((Path("x"), "pathlib"), (lambda: 3, "lambda")))
def test_what_is_no_plain_value_is_named(value: Any, told: str) -> None:
    with pytest.raises(
        ValueError, match=f"plain values and tensors alone: .* This is none: .*{told}"
    ) as error:
        saved_bytes({"a": value})
    assert "weights_only" not in str(error.value)


def choices(directory: Path) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    step = directory / "step-00000003"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    (directory / "file").touch()
    told = []
    for path, resume in (
        (step, "auto"),
        (step, 3),
        (directory, None),
        (directory / "file", "auto"),
        (step, None),
    ):
        with pytest.raises(ValueError) as error:
            choose_step(path, resume, group)  # type: ignore[arg-type]
        told.append(str(error.value))
    with pytest.raises(OSError) as folder:
        write_model_file(None, step, group)  # type: ignore[arg-type]  # before a file is looked at
    return [*told, str(folder.value)]


def test_folders_of_another_kind_are_refused_in_words_that_help(pool: Pool, tmp_path: Path) -> None:
    auto, number, above, file, damaged, model = pool.run(1, choices, tmp_path)[0]
    for told in (auto, number):
        assert f"step-00000003 is the folder of a step: give {tmp_path}, that of all of them" in told
    assert "is refused" in above and "Remove" not in above
    assert "file is a file: give a folder" in file
    assert "cannot be read, it is damaged" in damaged and "Remove" not in damaged
    assert "shard=True" in model


def go_back(directory: Path) -> list[tuple[str, list[str]]]:
    """What is chosen by each wish, and what is told."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for save, wish in ((6, "auto"), (12, 6), (9, "auto"), (None, 12), (None, 9)):
        if save is not None:
            commit_step(begin_step(directory, save), directory, save, {})
        with mock.patch("echelon.checkpoint.step._logger.warning") as warned:
            path = choose_step(directory, wish, group)  # type: ignore[arg-type]
        assert path is not None
        found.append((path.name, [call.args[0] % call.args[1:] for call in warned.call_args_list]))
    return found


def test_going_on_from_an_earlier_step_leaves_later_ones_behind_and_says_so(
    pool: Pool, tmp_path: Path
) -> None:
    (first, back, auto, last, again) = pool.run(1, go_back, tmp_path)[0]
    assert first == ("step-00000006", []) and last == ("step-00000012", [])
    assert (
        back[0] == "step-00000006"
        and "which leaves later steps behind: step-00000012. They stay" in back[1][0]
    )
    assert auto[0] == "step-00000009", "the step that was saved since is the one to go on from"
    assert "leaves later steps behind: step-00000012. They stay" in auto[1][0]
    assert again[0] == "step-00000009" and "leaves later steps behind: step-00000012" in again[1][0]


def write_alone(folder: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match="the process group was destroyed before"):
        _Writer(folder, group).finish(Metadata({}), [[]])  # of this rank alone
    _Writer(folder, group).finish(Metadata({}), [[], []])


def test_an_index_of_some_ranks_alone_is_never_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, write_alone, tmp_path)


def load_with_a_hole(folder: Path) -> None:
    """An index in which of each state a box is missing."""
    run = small_run()
    run.step(0)
    run.booster.save_optimizer(run.optimizer, folder)
    run.step(1)
    before = run.whole()
    if dist.get_rank() == 0:
        index = json.loads((folder / "index.json").read_text())
        for each in index["tensors"].values():
            each["boxes"].pop()
        (folder / "index.json").write_text(json.dumps(index))
    dist.barrier()
    with pytest.raises(ValueError, match=r"exp_avg/\S+: \d+ of its \d+ entries are nowhere"):
        run.booster.load_optimizer(run.optimizer, folder)
    after = run.whole()
    assert all(torch.equal(each, after[name]) for name, each in before.items())


def test_states_that_are_not_stored_are_no_zeros(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, load_with_a_hole, tmp_path / "optimizer")


def train_after_loading_for_inference(directory: Path) -> bool:
    run = small_run()
    run.step(0)
    run.booster.save_checkpoint(directory, 1, **run.everything).wait()
    before = run.step(1)
    with torch.inference_mode():
        run.booster.load_checkpoint(directory, **run.everything)
    return run.step(1) == before


def test_what_was_loaded_for_inference_can_be_trained(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, train_after_loading_for_inference, tmp_path) == [True, True]
