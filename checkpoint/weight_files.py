"""The weights of a Hugging Face folder, under the names that its files have. Names of a model are pretrained.py."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from ..lazy.files import FileTensor, ReadTensor, open_tensors
from .box import Box
from .model_files import SAFETENSORS, TORCH
from .pretrained_files import tensor_files
from .stored import Stored

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")


class WeightFiles:
    """The tensors of a folder; `Stored`.

    Raises:
        ValueError: there are none, a file is damaged, or two have a tensor of one name; names it.
        OSError: a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, FileTensor | ReadTensor] = {}
        self._paths: dict[str, Path] = {}
        for path in tensor_files(folder):
            for name, tensor in _opened(path).items():
                if name in self._tensors:
                    raise ValueError(f"{name} is both in {self._paths[name]} and in {path}")
                self._tensors[name], self._paths[name] = tensor, path

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        return tuple(self._tensors[name].geometry.size)

    def dtype(self, name: str) -> torch.dtype:
        """The format of one."""
        return self._tensors[name].geometry.dtype

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one, in memory of its own."""
        whole = self._tensors[name]()
        return whole[box.within(Box.whole(whole.shape))].clone(memory_format=torch.contiguous_format)

    def path(self, name: str) -> Path:
        """The file of one."""
        return self._paths[name]


def has_weights(folder: Path) -> bool:
    """Whether a folder is meant to hold the weights of a model."""
    return any(True for pattern in _PATTERNS for _ in folder.glob(pattern))


def index_path(folder: Path) -> Path | None:
    """The index by which the files of a folder are found; None where there is none, or one file is found without."""
    for names in (SAFETENSORS, TORCH):
        if (folder / names.one).is_file():
            return None
        if (folder / names.listing).is_file():
            return folder / names.listing
    return None


def nbytes(stored: Stored, name: str) -> int:
    """Bytes of a whole tensor."""
    return Box.whole(stored.shape(name)).numel * stored.dtype(name).itemsize


def all_bytes(stored: Stored) -> int:
    """Bytes of all tensors."""
    return sum(nbytes(stored, name) for name in stored.names)


def read_json(path: Path) -> dict[str, Any]:
    """The values of a JSON file, by name.

    Raises:
        ValueError: it cannot be read as that; names it.
    """
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, it is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a {type(found).__name__}, and no values by name: it is damaged")
    return found


def _opened(path: Path) -> Mapping[str, FileTensor | ReadTensor]:
    try:
        return open_tensors(path)
    except (KeyError, TypeError, AttributeError, RuntimeError, BadZipFile) as error:
        raise ValueError(f"{path} cannot be read, it is damaged: {error!r}") from error
