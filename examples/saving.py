"""Checkpoints of the examples: the options, when a run is saved, and going on from it. The loop is training.py."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from command_line import plugin_parameters, range_errors, refuse
from interruption import Interrupted, Interruption
from torch import nn
from transformers import PreTrainedTokenizerBase

from echelon import Booster, DistCoordinator
from echelon.checkpoint.background import Save
from echelon.checkpoint.step import Resumed
from echelon.checkpoint.steps import steps_in

Record = dict[str, Any]

# What a run that goes on may change: where it is computed, how it is judged, and what is told of it.
_FREE = {
    *("plugin", "gradient_checkpoint_ratio", "cache_dir"),
    *("eval_every", "eval_batch_size", "target", "target_name", "target_accuracy", "metrics", "curve"),
    *("save_dir", "save_every", "keep_last", "save_async", "resume", "save_model"),
    *("data", "max_bytes"),  # files may be moved: the script says by another setting what is in them
}


def add_saving_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of checkpoints."""
    add = parser.add_argument_group("checkpoints", "see docs/checkpoints.md").add_argument
    text = "a folder for all that the run needs to go on, saved at its end and when it is interrupted"
    add("--save_dir", type=Path, metavar="DIR", help=text)
    add("--save_every", type=int, metavar="STEPS", help="save so often, too")
    add("--keep_last", type=int, metavar="N", help="of the checkpoints; default: all")
    add("--save_async", action="store_true", help="write while training goes on")
    text = "go on from the newest checkpoint in --save_dir, if any or where one must be, or from a step (default: none)"
    add("--resume", type=_resume, metavar="auto|must|STEP|none", help=text)
    add(
        "--save_model",
        type=Path,
        metavar="DIR",
        help="a folder for the model at the end, for from_pretrained",
    )


def saving_errors(arguments: argparse.Namespace) -> list[str]:
    """Why there could be no such checkpoints; found before any work."""
    errors = range_errors(arguments, {"save_every": 1, "keep_last": 1}, {})
    errors += folder_errors(arguments, ("save_dir", "save_model"))
    if arguments.save_dir is None:
        names = ("save_every", "keep_last", "save_async", "resume")
        needing = [f"--{name}" for name in names if getattr(arguments, name)]
        if needing:
            errors.append(f"{', '.join(needing)} without --save_dir: give the folder of the checkpoints, too")
    elif arguments.resume is None and (there := _steps_seen_in(arguments.save_dir)):
        errors.append(
            f"--save_dir {arguments.save_dir} has checkpoints already, the last one {there[0].name}: give --resume "
            "auto to go on from it, or another folder"
        )
    return errors


def folder_errors(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Options of these that name a folder that could not be made or written to."""
    paths = {name: getattr(arguments, name) for name in names}
    places = {name: _unwritable(path) for name, path in paths.items() if path is not None}
    return [
        f"--{name} {paths[name]}: {place} is no folder that can be written to"
        for name, place in places.items()
        if place is not None
    ]


class NotSaved(Exception):
    """The run came to its end and its last checkpoint could not be written, which the first rank has reported."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where and how often a run is saved, and from what it goes on.

    Args:
        directory: of the checkpoints; None saves none.
        every: steps; None saves at the end alone.
        keep_last, use_async: as of `Booster.save_checkpoint`.
        resume: as of `Booster.load_checkpoint`; None begins anew.
        settings: what makes the run, plain values: what goes on must have the same.
    """

    directory: Path | None = None
    every: int | None = None
    keep_last: int | None = None
    use_async: bool = False
    resume: int | Literal["auto", "must"] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(arguments: argparse.Namespace, **settings: Any) -> "Saving":
        """The saving that the arguments ask for.

        Args:
            settings: further ones that make the run.
        """
        return Saving(
            directory=arguments.save_dir,
            every=arguments.save_every,
            keep_last=arguments.keep_last,
            use_async=arguments.save_async,
            resume=arguments.resume,
            settings={**_settings_of(arguments), **settings},
        )

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return True if it is to be saved after this step."""
        if self.directory is None:
            return False
        return step == num_steps or (self.every is not None and step % self.every == 0)


def resumed_records(load: Callable[..., Resumed | None], saving: Saving, num_steps: int) -> list[Record]:
    """Let a run go on from its checkpoint, and return the records up to it; none where it begins. Collective.

    Args:
        load: `Booster.load_checkpoint` of all that goes on.
        num_steps: of the whole run.

    Raises:
        Refused: there is no such checkpoint, or it is damaged, or of another run; the reason was reported.
    """
    if saving.resume is None:
        return []
    try:
        resumed = load(saving.directory, resume=saving.resume)
    except (ValueError, OSError) as error:
        refuse([f"--resume {saving.resume}: {error}"])
        raise
    if resumed is None:
        return []
    refuse(other_settings(saving.settings, resumed.user["settings"], resumed.path))
    ended = "the run had ended" if resumed.step == num_steps else "going on"
    DistCoordinator().print_on_master(f"{ended} after step {resumed.step}/{num_steps}: {resumed.path}")
    return resumed.user["records"]


class Keeper:
    """For the block, saves a run where it is due, and where Ctrl-C or SIGTERM ends it; then waits for the last save.

    Args:
        save: `Booster.save_checkpoint` of all that goes on.
        num_steps: of the whole run.
    """

    def __init__(self, save: Callable[..., Save], saving: Saving, num_steps: int) -> None:
        self._save = save
        self._saving = saving
        self._num_steps = num_steps
        self._last: Save | None = None
        self._interruption = Interruption()

    def __enter__(self) -> "Keeper":
        if self._saving.directory is not None:
            self._interruption.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_saved()
        self._interruption.end()

    def after_step(self, records: list[Record]) -> None:
        """Save what goes on after these records, where it is due. Collective over the world.

        Raises:
            Interrupted: a signal came on some rank, and the run was saved.
        """
        if self._saving.directory is None:
            return
        step, number = len(records), self._interruption.agreed()
        if number or self._saving.is_due(step, self._num_steps):
            user = {"settings": dict(self._saving.settings), "records": records}
            self._last = self._save(
                self._saving.directory,
                step,
                user=user if dist.get_rank() == 0 else None,  # speed and memory are each rank's own
                keep_last=self._saving.keep_last,
                use_async=self._saving.use_async,
            )
        if number:
            saved = f"is saved in {self._saving.directory}" if self._is_saved() else "could not be saved"
            DistCoordinator().print_on_master(
                f"interrupted after step {step}/{self._num_steps}, which {saved}"
            )
            raise Interrupted(number)

    def require_saved(self) -> None:
        """Let the last save end.

        Raises:
            NotSaved: it failed, on every rank.
        """
        if not self._is_saved():
            assert self._last is not None
            text = f"the end of the run could not be saved in {self._saving.directory}: {self._last.failure}"
            DistCoordinator().print_on_master(text)
            raise NotSaved

    def _is_saved(self) -> bool:
        """Return True if the last save was written, once it has ended; whoever wrote reports why it was not."""
        try:
            if self._last is not None:
                self._last.wait()
        except (OSError, ValueError, RuntimeError):
            return False
        return True


def other_settings(now: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> list[str]:
    """Why a run with these settings does not go on from one that was saved with others."""
    return [
        f"--{name} is {now.get(name)} here, and {path} was saved with {saved.get(name)}: give what that run was "
        "started with. The options of the plugin may differ"
        for name in sorted({*now, *saved})
        if now.get(name) != saved.get(name)
    ]


def export_model(
    path: Path | None, booster: Booster, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a folder for `from_pretrained`, the tokenizer beside the model; None writes nothing. Collective."""
    if path is None:
        return
    booster.save_model(model, path, shard=True)
    if tokenizer is not None and dist.get_rank() == 0:
        tokenizer.save_pretrained(path)


def _settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    free = _FREE | plugin_parameters().keys()
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in free
    }


def _resume(word: str) -> int | str | None:
    """The value of `--resume`."""
    if word in ("auto", "must", "none"):
        return None if word == "none" else word
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} must be auto, must, the number of a step, or none")
    return int(word)


def _steps_seen_in(path: Path) -> list[Path]:
    """Steps in a folder, newest first; none where it may not be looked into."""
    try:
        return steps_in(path)
    except PermissionError:
        return []


def _unwritable(path: Path) -> Path | None:
    """The obstacle to making a folder at a path; None where nothing is in the way."""
    # Not Path.exists, which raises where a folder above may not be looked into.
    nearest = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    return None if os.path.isdir(nearest) and os.access(nearest, os.R_OK | os.W_OK | os.X_OK) else nearest
