"""Tensors of any Hugging Face folder or file, by the names that a model has for them, read by boxes.

[Note: reading by boxes] Each tensor is a lazy one (lazy/tensor.py), also where it is converted from several of the
files: what transformers' own conversions do is recorded, and a box of their result is made of the boxes of the files
that it takes, wherever stacking, concatenating, cutting and transposing explain it. Else that tensor is converted
whole, and then cut.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..lazy.files import FileTensor, ReadTensor, open_tensors
from ..lazy.pretrained import refuse_quantized
from ..lazy.tensor import LazyTensor, lazily, real
from .box import Box
from .pretrained_files import tensor_files
from .pretrained_names import known_to
from .stored import Stored


def open_pretrained(path: Path | str, model: nn.Module | None = None) -> Stored:
    """The tensors of a file or folder, none of them read. Communicates nothing.

    Names are turned into those of the model as `from_pretrained` does: the prefix of the base model may be missing or
    too much, older names and those of other formats are known, experts may be stored one by one. What the model does
    not know keeps the name that it has in the file, unless `from_pretrained` passes over it in silence.

    Args:
        path: a safetensors or torch file of any name, an index of several, or a folder that holds them.
        model: a model of transformers, which may be cut: only its class and its config count. None, or another
            module, takes the names as they are.

    Raises:
        FileNotFoundError: there is no such file or folder, or nothing of a model in it.
        ValueError: files are broken, incomplete or quantized, hold something else, or cannot be converted.
    """
    path = Path(path)
    files = tensor_files(path)
    refuse_quantized(files[0].parent)
    tensors = {name: lazily(source) for name, source in _sources(files).items()}
    return _LazyStored(tensors if model is None else known_to(model, tensors, path))


class _LazyStored:
    """See [Note: reading by boxes]."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        whole = self._tensors[name]
        if Box.whole(whole.shape).common(box) != box and box.numel:
            raise AssertionError(f"{box} of {name}, which has shape {tuple(whole.shape)}")
        own = whole[box.within(Box.whole(whole.shape))].clone(memory_format=torch.contiguous_format)
        return real(own) if isinstance(own, LazyTensor) else own


def _sources(files: Collection[Path]) -> dict[str, FileTensor | ReadTensor]:
    """The tensors of several files together."""
    found: dict[str, FileTensor | ReadTensor] = {}
    for path in files:
        tensors = open_tensors(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{path} holds tensors that another file of {path.parent} holds too: {twice}")
        found |= tensors
    return found
