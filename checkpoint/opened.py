"""A checkpoint, or a Hugging Face folder, opened for reading in one process. Going on from one is resume.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .states import INDEX, StateFiles
from .step_folder import MANIFEST, manifest_of, newest_first
from .step_save import MODEL, OPTIMIZER, RANDOM, TRAINING
from .trained import GROUPS
from .values import read_values
from .weight_files import WeightFiles, has_weights, nbytes, read_json


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What there is in a folder; tensors are read when asked for.

    Args:
        path: the step-… folder, or the Hugging Face folder.
        manifest: None for a Hugging Face folder.
        model: the weights.
        config: of the model; None where the folder has none.
        optimizer: its tensors, None where there are none.
        groups: class, groups and scalars of the optimizer; empty where there is none.
        training: all that is no tensor of the model or the optimizer; empty for a Hugging Face folder.
        random: the random states of every rank, by its coordinates.
    """

    path: Path
    manifest: Mapping[str, Any] | None
    model: WeightFiles
    config: Mapping[str, Any] | None
    optimizer: StateFiles | None
    groups: Mapping[str, Any]
    training: Mapping[str, Any]
    random: Mapping[str, Mapping[str, Any]]

    @property
    def model_folder(self) -> Path:
        """Where the weights and their config are."""
        return self.path if self.manifest is None else self.path / MODEL


def find_folder(path: Path) -> Path:
    """The step-… folder or Hugging Face folder that is meant: this one, or the newest complete step in it.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path} is no folder: give a step-… folder, the one above, or a Hugging Face folder"
        )
    if (path / MANIFEST).is_file():
        return path
    complete = [step for step in newest_first(path) if (step / MANIFEST).is_file()]
    if complete:
        return complete[0]
    if has_weights(path):
        return path
    raise ValueError(
        f"{path} is no complete checkpoint (it has no {MANIFEST}), holds none (step-…), and is no Hugging Face folder "
        "(it has no model.safetensors or the like)"
    )


def open_folder(path: Path) -> Opened:
    """Open what `find_folder` found.

    Raises:
        ValueError: something in it is damaged; names the file.
        OSError: something in it is missing.
    """
    is_checkpoint = (path / MANIFEST).is_file()
    model = path / MODEL if is_checkpoint else path
    optimizer = path / OPTIMIZER
    has_optimizer = is_checkpoint and optimizer.is_dir()
    return Opened(
        path=path,
        manifest=manifest_of(path) if is_checkpoint else None,
        model=WeightFiles(model),
        config=read_config(model),
        optimizer=open_states(optimizer) if has_optimizer else None,
        groups=read_mapping(optimizer / GROUPS) if has_optimizer else {},
        training=read_mapping(path / TRAINING) if is_checkpoint else {},
        random={
            place_name(state.get("coordinates", {})): {
                name: each for name, each in state.items() if name != "coordinates"
            }
            for state in (read_random_states(path / RANDOM) if is_checkpoint else {}).values()
        },
    )


def open_states(folder: Path) -> StateFiles:
    """The optimizer's tensors, once their index says of each what it is.

    Raises:
        ValueError: it does not; names it.
    """
    states = StateFiles(folder)
    for name in states.names:
        try:
            nbytes(states, name)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / INDEX} does not say what {name} is, it is damaged: {error!r}"
            ) from error
    return states


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """The model's config, None where there is none.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / "config.json"
    return read_json(path) if path.is_file() else None


def read_random_states(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The random states of every rank, by the name of its file.

    Raises:
        ValueError: a file is damaged; names it.
    """
    return {path.name: read_mapping(path) for path in sorted(folder.glob("*.pt"))}


def place_name(coordinates: Mapping[str, int]) -> str:
    """A rank by its place on every axis: "pp 0, dp 1, sp 0, tp 0"."""
    return ", ".join(f"{axis} {rank}" for axis, rank in coordinates.items())


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Plain values by name.

    Raises:
        ValueError: they cannot be read; names the file.
    """
    found = read_values(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} has a {type(found).__name__}, and no values by name: it is damaged")
    return found
