"""Files of plain values: what a checkpoint holds beside tensors of many bytes."""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from .tensor_file import FileRecord, write_small


def saved_bytes(values: Any) -> bytes:
    """Plain values and tensors in torch's own format.

    Raises:
        ValueError: they hold something else, which could only be read by running code of the file.
    """
    try:
        content = torch_bytes(values)
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch raises several kinds, of pickle and its own
        raise ValueError(
            "a checkpoint holds plain values and tensors alone: numbers, texts, lists, tuples, dicts. "
            f"This is none: {_unsafe(error)}"
        ) from error
    return content


def value_faults(values: Any, what: str) -> list[str]:
    """The reason why values cannot be saved, if there is one. See `saved_bytes`."""
    try:
        saved_bytes(values)
    except ValueError as error:
        return [f"{what} cannot be saved: {error}"]
    return []


def _unsafe(error: Exception) -> str:
    """The class that is not to be read, or what else is wrong, where torch names it amid advice; else all it says."""
    told = str(error)
    found = re.search(r"GLOBAL (\S+)", told) or re.search(r"WeightsUnpickler error:\s*([^\n]+)", told)
    return found[1] if found else f"{type(error).__name__}: {told}"


def digest_of(values: Any) -> str:
    """A hash of plain values and tensors: the same of equal ones, also where they were made by two processes."""
    return xxhash.xxh3_128(repr(_comparable(values)).encode()).hexdigest()


def _comparable(values: Any) -> Any:
    """What has an equal `repr` where the values are equal: that of tensors is cut, and orders are chance."""
    if isinstance(values, Tensor):
        content = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return values.dtype, tuple(values.shape), xxhash.xxh3_128(content).hexdigest()
    if isinstance(values, Mapping):
        return {"of": sorted((repr(key), _comparable(value)) for key, value in values.items())}
    if isinstance(values, set | frozenset):
        return {"of": sorted(map(repr, values))}
    if isinstance(values, list | tuple):
        return [_comparable(each) for each in values]
    return values


def torch_bytes(values: Any) -> bytes:
    """Values that are known to be plain, in torch's own format."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def write_values(path: Path, values: Any) -> FileRecord:
    """Write plain values to a file, see `saved_bytes`."""
    return write_small(path, saved_bytes(values))


def read_values(path: Path) -> Any:
    """What `write_values` wrote.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: the file is damaged; names it.
    """
    content = path.read_bytes()
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds, of zip, pickle and its own
        raise ValueError(
            f"{path} cannot be read, it is damaged or no file of Echelon's: {_unsafe(error)}"
        ) from error
