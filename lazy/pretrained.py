"""`from_pretrained` without memory: within a block it finds lazy tensors in files, and real ones as ever elsewhere.

[Note: from_pretrained] transformers opens files, renames what it finds, converts it (experts one by one into one
tensor, for example), puts it into the model, initializes what is missing and ties what is tied. All that is left to it,
whatever its version: within the block, what it finds in files are lazy tensors, so conversions are recorded and
nothing is read. Two functions that it looks up in one of its modules are exchanged for that, for the thread that is in
the block, and put back when it leaves, also by an error.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import open_tensors
from .tensor import lazily


class _LazySlice:
    """What transformers takes a tensor of a safetensors file for until it reads it: here, a lazy tensor."""

    def __init__(self, outline: Any, tensor: Tensor) -> None:
        self._outline = outline
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outline, name)


class _LazyFile:
    """A safetensors file as transformers opens it, of which the tensors are lazy."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file = file
        self._tensors = {name: lazily(source) for name, source in open_tensors(path).items()}

    def get_slice(self, name: str) -> _LazySlice:
        """See `_LazySlice`."""
        return _LazySlice(self._file.get_slice(name), self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """A lazy one."""
        return self._tensors[name]

    def __enter__(self) -> "_LazyFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def reading_lazily() -> Iterator[None]:
    """Let `from_pretrained` find lazy tensors in files; see [Note: from_pretrained]."""
    from transformers import modeling_utils

    opened, loaded = modeling_utils.safe_open, modeling_utils.load_state_dict
    modeling_utils.safe_open = _opening_lazily(opened)
    modeling_utils.load_state_dict = _loading_lazily(loaded)
    try:
        yield
    finally:
        modeling_utils.safe_open, modeling_utils.load_state_dict = opened, loaded


def refuse_quantized(folder: Path) -> None:
    """Raise for a folder whose config.json says that its weights are quantized.

    Raises:
        ValueError: they are; says by what.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if found := config.get("quantization_config"):
        method = found.get("quant_method") or "an unknown method"
        raise ValueError(
            f"the weights in {folder} are quantized ({method}): quantized weights can neither be split nor trained, "
            "so use the folder of the model before it was quantized, or dequantize it with transformers and save it"
        )


def _opening_lazily(opened: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for `safetensors.safe_open`."""
    thread = threading.get_ident()

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        file = opened(filename, *args, **kwargs)
        if threading.get_ident() != thread:
            return file
        refuse_quantized(Path(filename).parent)
        return _LazyFile(file, Path(filename))

    return safe_open


def _loading_lazily(loaded: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for transformers' `load_state_dict`, which reads torch's own files."""
    thread = threading.get_ident()

    def load_state_dict(checkpoint_file: Any, map_location: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        path = Path(checkpoint_file)
        if threading.get_ident() != thread or str(map_location) != "cpu" or path.suffix == ".safetensors":
            return loaded(checkpoint_file, map_location, *args, **kwargs)
        refuse_quantized(path.parent)
        return {name: lazily(source) for name, source in open_tensors(path).items()}

    return load_state_dict
