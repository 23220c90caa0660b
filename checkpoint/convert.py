"""A checkpoint written again: in other files, or for Hugging Face alone. One tensor is in memory at a time."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .opened import Opened
from .rearranged import Rearranged, master_names, model_tensors, state_tensors
from .rewriting import Progress, Records, copy_small, write_model, write_states
from .states import INDEX
from .step_folder import begin_step, commit_step, damage_of, sync_folder
from .step_save import MODEL, OPTIMIZER, below
from .unfinished import make_anew, remove_abandoned, unfinished, unfinished_of_all
from .weight_files import all_bytes


@dataclass(frozen=True, kw_only=True)
class Resharding:
    """The same checkpoint in other files.

    Args:
        opened: the checkpoint.
        out: the new step's folder, which is not there.
        max_bytes: of a file of weights; a larger tensor has one of its own.
        optimizer_files: into how many files the optimizer's tensors go.
        dtype: of the weights, None for their own. Float32 masters come and go with 16-bit weights, see `state_tensors`.
    """

    opened: Opened
    out: Path
    max_bytes: int
    optimizer_files: int
    dtype: torch.dtype | None = None

    @property
    def weights(self) -> Rearranged:
        """The weights to be written: rounded from their masters, where there are any."""
        return model_tensors(self.opened, self.dtype, from_masters=self.dtype is not None)

    @property
    def states(self) -> Rearranged:
        """The optimizer's tensors to be written."""
        return state_tensors(self.opened, self.dtype)

    @property
    def total_bytes(self) -> int:
        """What `write` tells of in all."""
        return _bytes_to_check(self.opened) + all_bytes(self.weights) + all_bytes(self.states)

    def write(self, progress: Progress) -> None:
        """Do it; the folder is at `out` once it is complete, and only then.

        Args:
            progress: told the bytes of what was read to check it, and of each tensor that was written.

        Raises:
            OSError: it cannot be written.
            ValueError: the checkpoint is damaged, or the format cannot hold the weights.
        """
        _refuse_damage(self.opened, progress)
        assert self.opened.manifest is not None
        step = self.opened.manifest["step"]
        with _beside(self.out) as beside:
            folder = begin_step(beside, step)
            records = below(MODEL, _write_weights(self, folder / MODEL, progress))
            if self.opened.optimizer is not None:
                files = write_states(self.states, folder / OPTIMIZER, self.optimizer_files, progress)
                records |= below(OPTIMIZER, files)
            for name in _other_files(self.opened):
                records[name] = copy_small(self.opened.path / name, folder / name)
            os.rename(commit_step(folder, beside, step, records), self.out)


@dataclass(frozen=True, kw_only=True)
class Export:
    """A folder that from_pretrained reads.

    Args:
        opened: a checkpoint or a Hugging Face folder.
        out: the new folder, which is not there.
        max_bytes: of a file; a larger tensor has one of its own.
        dtype: of the weights, None for their own.
        masters: whether the float32 master of a weight is taken where there is one.
    """

    opened: Opened
    out: Path
    max_bytes: int
    dtype: torch.dtype | None = None
    masters: bool = False

    @property
    def weights(self) -> Rearranged:
        """The weights to be written."""
        return model_tensors(self.opened, self.dtype, from_masters=self.masters)

    @property
    def total_bytes(self) -> int:
        """What `write` tells of in all."""
        return _bytes_to_check(self.opened) + all_bytes(self.weights)

    def write(self, progress: Progress) -> None:
        """Do it, as `Resharding.write`."""
        _refuse_damage(self.opened, progress)
        with _beside(self.out) as beside:
            folder = beside / self.out.name
            _write_weights(self, folder, progress)
            sync_folder(folder)
            os.rename(folder, self.out)


def out_fault(out: Path, source: Path) -> str | None:
    """Why nothing can be written there from a folder."""
    if out != source and out.resolve().is_relative_to(source.resolve()):
        return f"{out} lies in {source}, which is read and stays as it is: give a path outside of it"
    if out.exists() or out.is_symlink():
        return f"{out} is there already: give a path that is not, or remove it"
    if not out.parent.is_dir():
        return f"there is no folder {out.parent} for {out.name}: make it first"
    return None


def masters_fault(opened: Opened) -> str | None:
    """Why there are no masters to take."""
    if master_names(opened):
        return None
    return f"{opened.path} has no float32 masters: leave --masters out, the weights are all there is"


def _bytes_to_check(opened: Opened) -> int:
    return sum(record.bytes for record in opened.manifest["files"].values()) if opened.manifest else 0


def _refuse_damage(opened: Opened, progress: Progress) -> None:
    """What is written anew has hashes that are right, whatever it was copied from: so the source is looked at first.

    Raises:
        ValueError: it is damaged; lists all of it.
    """
    if opened.manifest is None:
        return
    faults: list[str] = []
    for name, record in opened.manifest["files"].items():
        faults += damage_of(opened.path, name, record)
        progress(record.bytes)
    if faults:
        raise ValueError(f"nothing is written from a damaged checkpoint: {'; '.join(faults)}")


def _other_files(opened: Opened) -> Iterator[str]:
    """What a checkpoint has beside the model and the optimizer's tensors."""
    assert opened.manifest is not None
    for name in opened.manifest["files"]:
        is_index = name == f"{OPTIMIZER}/{INDEX}"
        if not name.startswith(f"{MODEL}/") and not name.endswith(".safetensors") and not is_index:
            yield name


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder beside `out`, from which it is renamed; removed in the end, whatever happens."""
    remove_abandoned(unfinished_of_all(out))
    beside = unfinished(out)
    make_anew(beside)
    try:
        yield beside
    finally:
        shutil.rmtree(beside)
        sync_folder(out.parent)


def _write_weights(conversion: Resharding | Export, folder: Path, progress: Progress) -> Records:
    opened, weights = conversion.opened, conversion.weights
    return write_model(
        weights,
        folder,
        source=opened.model_folder,
        max_bytes=conversion.max_bytes,
        keeps_formats=all(weights.dtype(name) == opened.model.dtype(name) for name in weights.names),
        progress=progress,
    )
