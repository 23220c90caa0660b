"""Tensors of files, mapped into memory: safetensors by its library, torch's own format by torch. Also files of JSON.

[Note: mapping] Only the pages that are accessed are read, and the kernel may evict them. A file may be
replaced or deleted while its tensors are in use, and must not be written to.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def open_tensors(path: Path) -> dict[str, Tensor]:
    """Open all tensors of a safetensors or torch file, by name; see [Note: mapping].

    The format is detected from the content, not from the file name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or incomplete, or contains anything but dense, unquantized tensors.
    """
    with open(path, "rb") as file:
        start = file.read(9)
    with _disable_current_modes():  # the mode of LazyInitContext
        if start[8:] == b"{":  # first, since the header's length may look like the start of a torch file
            return _of_safetensors(path)
        if start.startswith((b"PK", b"\x80")):
            return _of_torch(path, is_mapped=start.startswith(b"PK"))
    raise ValueError(
        f"{path} is neither a safetensors nor a torch file, since it begins with {start!r}: give one of these, or the "
        "folder of a model"
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Read named values from a file of JSON.

    Raises:
        OSError: the file does not exist, or this process may not read it.
        ValueError: the file is damaged, or has no named values; names it.
    """
    content = path.read_bytes()
    try:
        return named_values(json.loads(content), path)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON, so it is damaged: {error}") from error


def named_values(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the content of a file. Raises ValueError if it is no mapping."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} has a {type(content).__name__}, not named values: it is damaged")
    return content


def _of_safetensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file: {error}") from error


def _of_torch(path: Path, *, is_mapped: bool) -> dict[str, Tensor]:
    """Load the tensors of a torch file; a file from before torch 1.6 is read instead of mapped."""
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except OSError:
        raise
    except Exception as error:  # torch raises errors of zip, of pickle and its own
        raise ValueError(f"torch cannot load {path} as a file of tensors alone: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        entries = type(loaded).__name__ if not isinstance(loaded, dict) else sorted(map(str, loaded))[:8]
        raise ValueError(
            f"{path} contains other values than named tensors ({entries}): save a state_dict alone"
        )
    odd = [
        name for name, tensor in loaded.items() if tensor.layout is not torch.strided or tensor.is_quantized
    ]
    if odd:
        raise ValueError(f"{path} contains sparse or quantized tensors: {', '.join(odd)}: save dense ones")
    return {name: tensor.detach() for name, tensor in loaded.items()}
