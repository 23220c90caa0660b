"""The weights of a Hugging Face folder, under the names that its files have. Names of a model are pretrained.py."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .box import Box
from .stored import Stored
from .tensor_file import TensorFile

# What from_pretrained looks for, in its order: an index, or the file alone.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class PickledFile:
    """A file that torch.save wrote, read by boxes; `Stored`. It is mapped.

    Raises:
        ValueError: it cannot be read so; says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _mapped(path)
        if not isinstance(self._tensors, Mapping) or not all(map(torch.is_tensor, self._tensors.values())):
            raise ValueError(f"{path} has more than tensors by name: give the weights of a model")

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """The format of one."""
        return self._tensors[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one, in memory of its own."""
        return self._tensors[name][box.within(Box.whole(self.shape(name)))].clone()


class WeightFiles:
    """The tensors of several files as one `Stored`.

    Args:
        files: no two with a tensor of the same name.

    Raises:
        ValueError: a name is in several files; names them.
    """

    def __init__(self, files: Sequence[TensorFile | PickledFile]) -> None:
        self._home: dict[str, TensorFile | PickledFile] = {}
        for file in files:
            for name in file.names:
                if name in self._home:
                    raise ValueError(f"{name} is both in {self._home[name].path} and in {file.path}")
                self._home[name] = file

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        return self._home.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        return self._home[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The format of one."""
        return self._home[name].dtype(name)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one, in memory of its own."""
        return self._home[name].read(name, box)

    def path(self, name: str) -> Path:
        """The file of one."""
        return self._home[name].path


def open_weights(folder: Path) -> WeightFiles:
    """The weights of a folder.

    Raises:
        ValueError: there are none, or a file is damaged; names it.
    """
    paths = weight_paths(folder)
    if not paths:
        raise ValueError(f"{folder} has no weights: neither .safetensors files nor {WEIGHTS[1]}")
    return WeightFiles(
        [TensorFile(path) if path.suffix == ".safetensors" else PickledFile(path) for path in paths]
    )


def weight_paths(folder: Path) -> list[Path]:
    """The files of a folder's weights, of the kind that from_pretrained prefers; none where there are none.

    Raises:
        ValueError: an index cannot be read.
    """
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / file for file in dict.fromkeys(weight_map(index).values())]
        if (folder / name).is_file():
            return [folder / name]
    return sorted(folder.glob("*.safetensors"))


def weight_map(index: Path) -> Mapping[str, str]:
    """Which tensor is in which file, as an index has it.

    Raises:
        ValueError: it is no index.
    """
    listing = read_json(index)
    found = listing.get("weight_map") if isinstance(listing, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index} has no weight_map of tensors to files: it is damaged")
    return found


def nbytes(stored: Stored, name: str) -> int:
    """Bytes of a whole tensor."""
    return Box.whole(stored.shape(name)).numel * stored.dtype(name).itemsize


def all_bytes(stored: Stored) -> int:
    """Bytes of all tensors."""
    return sum(nbytes(stored, name) for name in stored.names)


def read_json(path: Path) -> Any:
    """What a JSON file says.

    Raises:
        ValueError: it cannot be read; names it.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, it is damaged: {error}") from error


def _mapped(path: Path) -> Mapping[str, Tensor]:
    """What torch.save wrote; nothing but tensors and plain values is made of it."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # torch raises several kinds, of zip, pickle and its own
        raise ValueError(f"{path} cannot be read by parts, or is damaged: {error}") from error
    return found
