"""Faults in checkpoints: state that is not restored, undetected damage, a lost step."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.checkpoint.dcp import StateFiles
from echelon.checkpoint.inspection import examine, find_folder
from echelon.checkpoint.local_tensors import LocalBox, LocalTensor
from echelon.checkpoint.step_folders import recover
from echelon.verify.resume import contents_of, differing

from ...checkpoint.failures import at_every_write, flip_every_file
from ...checkpoint.handmade import Handmade, small_config
from ...checkpoint.runs import TINY, Run, config_of, small_run
from ..mutations import around, fault, returning


class Killed(BaseException):
    """The end of a process that no code can prevent."""


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder that all ranks share. Collective."""
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    yield Path(place[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place[0])


def resumed() -> str | None:
    """Return the difference between a run that saves a checkpoint and another one that loads it."""
    with shared_folder() as folder:
        run, other = small_run(), small_run(seed=7)
        for number in range(3):
            run.step(number)
        run.booster.save_checkpoint(folder, 3, **run.everything).wait()
        saved, drawn = run.unsharded(), torch.rand(4)
        other.booster.load_checkpoint(folder, **other.everything)
        loaded, redrawn = other.unsharded(), torch.rand(4)
        if departing := [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]:
            return f"loaded: {departing}"
        if not torch.equal(drawn, redrawn):
            return "random numbers"
        run.step(3)
        other.step(3)
        stepped, after = run.unsharded(), other.unsharded()
        departing = [name for name, tensor in stepped.items() if not torch.equal(tensor, after[name])]
        return f"stepped: {departing}" if departing else None


def resumed_under_zero(precision: str) -> str | None:
    """Return the difference between a run under tensor parallelism that saves and one under ZeRO that loads.

    Contents are gathered without the boxes of checkpoints.
    """
    with shared_folder() as folder:
        run = Run(config_of(**TINY), tp_size=2, precision=precision)
        for number in range(2):
            run.step(number)
        run.booster.save_checkpoint(folder, 2, model=run.model, optimizer=run.optimizer).wait()
        saved = contents_of(run.model, run.optimizer)
        other = Run(config_of(**TINY), seed=7, zero_stage=1, precision=precision, initial_scale=2.0**9)
        other.booster.load_checkpoint(folder, model=other.model, optimizer=other.optimizer)
        departing = differing(saved, contents_of(other.model, other.optimizer))
        return f"loaded: {departing}" if departing else None


def flipped() -> str | None:
    """Return a file of a checkpoint in which a flipped bit is not detected."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Handmade.of(small_config()).write(Path(directory))
        for path, _ in flip_every_file(folder, 2):
            if not examine(folder, progress=lambda _: None).errors:
                return f"{path.name} is called sound"
    return None


def replaced() -> str | None:
    """Return the call after which a kill during the replacement of a step loses data."""
    with tempfile.TemporaryDirectory() as directory:
        number = 0
        while True:
            number += 1
            place = Path(directory) / str(number)
            Handmade.of(small_config(), seed=1).write(place)

            def point(called: int, what: str, number: int = number) -> None:
                if called == number:
                    raise Killed(what)

            with at_every_write(place, point) as calls:
                try:
                    Handmade.of(small_config(), seed=2).write(place)
                except Killed as last:
                    what = str(last)
                else:
                    return None if len(calls) > 30 else f"{len(calls)} calls alone"
            recover(place)
            try:
                errors = examine(find_folder(place), progress=lambda _: None).errors
            except ValueError as error:
                errors = (str(error),)
            if errors:
                return f"killed at {what}: {errors}"


def without_counts(state: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Restart AdamW's bias correction."""
    optimizer_state = state(*args)
    for parameter_state in optimizer_state["state"].values():
        parameter_state["step"] = torch.zeros_like(parameter_state["step"])
    return optimizer_state


def without_options(state: Callable[..., dict[str, Any]], trained: Any, *args: Any) -> dict[str, Any]:
    """Keep the learning rates that the optimizer was built with."""
    made = state(trained, *args)
    for group, present in zip(made["param_groups"], trained.inner.param_groups, strict=True):
        group["lr"] = present["lr"] * 2
    return made


def shifted(local_piece: Callable[..., LocalTensor], *args: Any, **kwargs: Any) -> LocalTensor:
    """Shift the first box of a tensor by one row."""
    local = local_piece(*args, **kwargs)
    first = next(iter(local.boxes), None)
    if first is None or not local.shape or first.box.ends()[0] == local.shape[0]:
        return local
    start, *rest = first.box.offset
    moved = LocalBox(first.box._replace(offset=(start + 1, *rest)), first.local)
    return replace(local, boxes=(moved, *local.boxes[1:]))


def without_masters(
    read_into: Callable[..., None], local: Mapping[str, LocalTensor], stored: StateFiles
) -> None:
    """Make master weights from the 16-bit weights."""
    read_into({name: tensor for name, tensor in local.items() if not name.startswith("master/")}, stored)


def without_one_state(
    read_into: Callable[..., None], local: Mapping[str, LocalTensor], stored: StateFiles
) -> None:
    """Leave one tensor of the last rank's states at zero."""
    left = next(name for name in local if name.startswith("exp_avg_sq/") and local[name].boxes)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    read_into({name: tensor for name, tensor in local.items() if not (is_last and name == left)}, stored)


def rotated(received: Callable[..., torch.Tensor], written: Any, *args: Any) -> torch.Tensor:
    """Rotate by one entry a tensor that consists of several ranks' boxes."""
    tensor = received(written, *args)
    return tensor if len(written.sources) == 1 else tensor.view(-1).roll(1).view(tensor.shape)


def on_one_rank_alone(plan: Callable[..., Any], planner: Any) -> Any:
    """Leave the last rank's boxes of states out of the plan."""
    if dist.get_rank() == dist.get_world_size() - 1:
        planner._items.clear()
    return plan(planner)


def remove_first(folder: Path, final: Path) -> Path:
    """Remove the step to be replaced before the new one has its name."""
    if final.exists():
        shutil.rmtree(final)
    os.rename(folder, final)
    return folder


UNDER_ZERO, UNDER_ZERO_BF16, UNDER_ZERO_FP16 = (
    partial(resumed_under_zero, precision) for precision in ("fp32", "bf16", "fp16")
)

# fmt: off
FAULTS = {
    "boxes of other ranks are misplaced": fault("checkpoint.exchange:_received", around(rotated), UNDER_ZERO,
        notice="loaded"),
    "states of one rank are not written": fault("checkpoint.dcp:_Planner.create_local_plan", around(on_one_rank_alone),
        UNDER_ZERO),
    "weights are not read": fault("checkpoint.pretrained:read_into", returning(None), resumed,
        notice="loaded.*model.norm.weight"),
    "states of the optimizer are not read": fault("checkpoint.optimizer_state:read_into", returning(None), resumed,
        notice="loaded.*exp_avg", quick=True),
    "counts of steps are lost": fault("checkpoint.optimizer_state:_torch_state", around(without_counts), resumed,
        notice="stepped"),
    "random states are not restored": fault("checkpoint.full_state:_restore_random", returning(None), resumed,
        notice="random numbers"),
    "options are not loaded": fault("checkpoint.optimizer_state:_torch_state", around(without_options), UNDER_ZERO,
        notice="loaded.*group 0"),
    "a box is off by one row": fault("plugins.state:local_piece", around(shifted), UNDER_ZERO),
    "a state is left at zero": fault("checkpoint.optimizer_state:read_into", around(without_one_state), UNDER_ZERO,
        notice="loaded.*exp_avg_sq/"),
    "masters are not loaded": fault("checkpoint.optimizer_state:read_into", around(without_masters), UNDER_ZERO_BF16,
        notice="loaded.*master/"),
    "the loss scale is not restored": fault("zero.precision:DynamicScaler.load_state_dict", returning(None),
        UNDER_ZERO_FP16, notice="loss scaler"),
    "a flipped bit is not detected": fault("checkpoint.inspection:damage_of", returning([]), flipped, num_ranks=1,
        notice="called sound"),
    "a step is removed before the new one has its name": fault("checkpoint.step_folders:_name_step", remove_first,
        replaced, num_ranks=1, notice="killed at"),
}
# fmt: on
