"""Faults in checkpoints: state that is not restored, damage that is not seen, a step that is lost."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.checkpoint.inspect import examine_checkpoint, find_folder
from echelon.checkpoint.steps import recover

from ...checkpoint.failures import at_every_write, flip_every_file
from ...checkpoint.handmade import Handmade, small_config
from ...checkpoint.runs import small_run
from ..mutations import Mutation


class Killed(BaseException):
    """Ends a process, for all that the code can do about it."""


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks. Collective."""
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    yield Path(place[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place[0])


def resumed() -> str | None:
    """Return what another run that loads a checkpoint has otherwise than the one that saved it."""
    with shared_folder() as folder:
        run, other = small_run(), small_run(seed=7)
        for number in range(3):
            run.step(number)
        run.booster.save_checkpoint(folder, 3, **run.everything).wait()
        saved, drawn = run.whole(), torch.rand(4)
        other.booster.load_checkpoint(folder, **other.everything)
        loaded, redrawn = other.whole(), torch.rand(4)
        if departing := [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]:
            return f"loaded: {departing}"
        if not torch.equal(drawn, redrawn):
            return "random numbers"
        run.step(3)
        other.step(3)
        stepped, after = run.whole(), other.whole()
        departing = [name for name, tensor in stepped.items() if not torch.equal(tensor, after[name])]
        return f"stepped: {departing}" if departing else None


def flipped() -> str | None:
    """Return a file of a checkpoint in which a flipped bit is not seen."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Handmade.of(small_config()).write(Path(directory))
        for path, _ in flip_every_file(folder, 2):
            if not examine_checkpoint(folder, progress=lambda _: None).errors:
                return f"{path.name} is called sound"
    return None


def replaced() -> str | None:
    """Return the call after which a process may not be killed while a step is replaced."""
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
                errors = examine_checkpoint(find_folder(place), progress=lambda _: None).errors
            except ValueError as error:
                errors = (str(error),)
            if errors:
                return f"killed at {what}: {errors}"


def do_nothing(*args: object) -> None:
    return None


def no_damage(*args: object) -> list[str]:
    return []


def without_counts(state: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """AdamW begins anew to correct the bias of its averages."""

    def counted(*args: Any) -> dict[str, Any]:
        found = state(*args)
        for each in found["state"].values():
            each["step"] = torch.zeros_like(each["step"])
        return found

    return counted


def remove_first(folder: Path, final: Path) -> Path:
    """Remove the step that is replaced before the new one has its name."""
    if final.exists():
        shutil.rmtree(final)
    os.rename(folder, final)
    return folder


FAULTS = {
    "weights are not read": Mutation(
        target="echelon.checkpoint.pretrained:read_into",
        replacement=do_nothing,
        check=resumed,
        notice="loaded.*model.norm.weight",
    ),
    "states of the optimizer are not read": Mutation(
        target="echelon.checkpoint.optimizer:read_into",
        replacement=do_nothing,
        check=resumed,
        notice="loaded.*exp_avg",
        quick=True,
    ),
    "counts of steps are lost": Mutation(
        target="echelon.checkpoint.optimizer:_torch_state",
        wrapper=without_counts,
        check=resumed,
        notice="stepped",
    ),
    "random states are not restored": Mutation(
        target="echelon.checkpoint.step:_restore_random",
        replacement=do_nothing,
        check=resumed,
        notice="random numbers",
    ),
    "a flipped bit is not seen": Mutation(
        target="echelon.checkpoint.inspect:damage_of",
        replacement=no_damage,
        check=flipped,
        num_ranks=1,
        notice="called sound",
    ),
    "a step goes before another has its name": Mutation(
        target="echelon.checkpoint.steps:_name_step",
        replacement=remove_first,
        check=replaced,
        num_ranks=1,
        notice="killed at",
        quick=True,
    ),
}
