"""Checkpoints of the examples: options, the saves of a run, resuming, and export of the model."""

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

# Options that a resumed run may change: its layout, evaluations and reports.
_FREE = {
    *("plugin", "gradient_checkpoint_ratio", "cache_dir"),
    *("eval_every", "eval_batch_size", "target", "target_name", "target_accuracy", "metrics", "curve"),
    *("save_dir", "save_every", "keep_last", "save_async", "resume", "save_model"),
    *("data", "max_bytes"),  # files may be moved; another setting has a digest of their contents
}


def add_saving_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of checkpoints."""
    add = parser.add_argument_group("checkpoints", "see docs/checkpoints.md").add_argument
    text = "folder for checkpoints, written at the end and when the run is interrupted"
    add("--save_dir", type=Path, metavar="DIR", help=text)
    add("--save_every", type=int, metavar="STEPS", help="also save every STEPS steps")
    add("--keep_last", type=int, metavar="N", help="keep the newest N checkpoints; default: all")
    add("--save_async", action="store_true", help="write during training")
    text = "resume from the newest checkpoint in --save_dir (auto: if any, must: required) or a step (default: none)"
    add("--resume", type=_resume, metavar="auto|must|STEP|none", help=text)
    add(
        "--save_model",
        type=Path,
        metavar="DIR",
        help="folder for the trained model, for from_pretrained",
    )


def saving_errors(arguments: argparse.Namespace) -> list[str]:
    """Return errors of the checkpoint options, before any work."""
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
    """Return errors for those of the named options whose folder cannot be created or written to."""
    paths = {name: getattr(arguments, name) for name in names}
    places = {name: _unwritable(path) for name, path in paths.items() if path is not None}
    return [
        f"--{name} {paths[name]}: {place} is no folder that can be written to"
        for name, place in places.items()
        if place is not None
    ]


class NotSaved(Exception):
    """The last checkpoint of a completed run could not be written; the first rank has reported it."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Directory and frequency of a run's checkpoints, and the checkpoint to resume from.

    Args:
        directory: directory of the checkpoints; None saves none.
        every: steps between saves; None saves at the end only.
        keep_last, use_async: see `Booster.save_checkpoint`.
        resume: see `Booster.load_checkpoint`; None starts a new run.
        settings: plain values that must be equal in a resumed run.
    """

    directory: Path | None = None
    every: int | None = None
    keep_last: int | None = None
    use_async: bool = False
    resume: int | Literal["auto", "must"] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(arguments: argparse.Namespace, **settings: Any) -> "Saving":
        """Make it from the arguments.

        Args:
            settings: further settings that must be equal in a resumed run.
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
        """Return True if the run is to be saved after this step."""
        if self.directory is None:
            return False
        return step == num_steps or (self.every is not None and step % self.every == 0)


def resumed_records(load: Callable[..., Resumed | None], saving: Saving, num_steps: int) -> list[Record]:
    """Load the checkpoint to resume from and return the records up to it; an empty list for a new run. Collective.

    Args:
        load: `Booster.load_checkpoint` with the state of the run.
        num_steps: total number of steps of the run.

    Raises:
        Refused: the checkpoint is missing, damaged or of another run; the error was reported.
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
    ended = "the run had ended" if resumed.step == num_steps else "resuming"
    DistCoordinator().print_on_master(f"{ended} after step {resumed.step}/{num_steps}: {resumed.path}")
    return resumed.user["records"]


class Keeper:
    """Context that saves a run when due or interrupted by Ctrl-C or SIGTERM, and on exit waits for the last save.

    Args:
        save: `Booster.save_checkpoint` with the state of the run.
        num_steps: total number of steps of the run.
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
        """Save the run with the records so far if a save is due. Collective over the world.

        Raises:
            Interrupted: a rank received a signal; the run was saved.
        """
        if self._saving.directory is None:
            return
        step, number = len(records), self._interruption.agreed()
        if number or self._saving.is_due(step, self._num_steps):
            user = {"settings": dict(self._saving.settings), "records": records}
            self._last = self._save(
                self._saving.directory,
                step,
                user=user if dist.get_rank() == 0 else None,  # speed and memory differ between ranks
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
        """Wait for the last save.

        Raises:
            NotSaved: the save failed; raised on every rank.
        """
        if not self._is_saved():
            assert self._last is not None
            text = f"the end of the run could not be saved in {self._saving.directory}: {self._last.failure}"
            DistCoordinator().print_on_master(text)
            raise NotSaved

    def _is_saved(self) -> bool:
        """Wait for the last save and return True if it was written; the writing rank reports a failure."""
        try:
            if self._last is not None:
                self._last.wait()
        except (OSError, ValueError, RuntimeError):
            return False
        return True


def other_settings(now: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> list[str]:
    """Return an error for each setting that differs from those of the saved run."""
    return [
        f"--{name} is {now.get(name)} here, and {path} was saved with {saved.get(name)}: give what that run was "
        "started with. The options of the plugin may differ"
        for name in sorted({*now, *saved})
        if now.get(name) != saved.get(name)
    ]


def export_model(
    path: Path | None, booster: Booster, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the model and its tokenizer to a folder for `from_pretrained`; None writes nothing. Collective."""
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
    """Parse the value of `--resume`."""
    if word in ("auto", "must", "none"):
        return None if word == "none" else word
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} must be auto, must, the number of a step, or none")
    return int(word)


def _steps_seen_in(path: Path) -> list[Path]:
    """Return the steps in a folder, newest first; an empty list if it is not readable."""
    try:
        return steps_in(path)
    except PermissionError:
        return []


def _unwritable(path: Path) -> Path | None:
    """Return the nearest existing path if it prevents a folder from being created or written to, else None."""
    # Not Path.exists, which raises if a parent folder is not readable.
    nearest = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    return None if os.path.isdir(nearest) and os.access(nearest, os.R_OK | os.W_OK | os.X_OK) else nearest
