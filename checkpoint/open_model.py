"""The files of a model, wherever they come from, as `Stored`."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .box import Box
from .held_model import HeldModel
from .model_files import SAFETENSORS
from .stored import Stored
from .tensor_file import TensorFile


def open_model(path: Path, model: HeldModel) -> Stored:
    """A file or a folder."""
    if path.is_file():
        return TensorFile(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no model file {path}: give the path that save_model was given")
    if (listing := path / SAFETENSORS.listing).exists():
        return _Several(path, json.loads(listing.read_text())["weight_map"])
    return TensorFile(path / SAFETENSORS.one)


class _Several:
    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self._places = places
        self._files = {name: TensorFile(folder / name) for name in set(places.values())}

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[self._places[name]].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._files[self._places[name]].dtype(name)

    def read(self, name: str, box: Box) -> Tensor:
        return self._files[self._places[name]].read(name, box)
