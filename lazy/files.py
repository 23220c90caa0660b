"""Tensors in files, mapped into memory: safetensors one by one, torch's own format by torch.

[Note: mapping] A tensor of a safetensors file is mapped when it is read and dropped with what was made of it, so only
the pages that somebody looked at count, and only as long. The file is kept open, so it may be replaced or deleted
meanwhile; not changed.
"""

import json
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .replay import Geometry

# The formats of safetensors.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SAMPLES = 64


class OpenFile:
    """A file that is open for reading, and refuses once it was changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.descriptor)
        self._state = self._present_state()

    def mapped(self, start: int, num_bytes: int) -> Tensor:
        """Some bytes of it, 1-D, in pages of its own: writing to them would change this copy alone.

        Raises:
            RuntimeError: the file was changed since it was opened.
        """
        if self._present_state() != self._state:
            raise RuntimeError(f"{self.path} was changed while a model was being read from it: read it again")
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        before = start % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self.descriptor, before + num_bytes, access=mmap.ACCESS_COPY, offset=start - before)
        return torch.frombuffer(pages, dtype=torch.uint8, offset=before, count=num_bytes)

    def _present_state(self) -> tuple[int, int]:
        state = os.fstat(self.descriptor)
        return state.st_size, state.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file; see [Note: mapping].

    Args:
        file: the file.
        name: of the tensor there.
        start: the byte of the file at which it begins.
        geometry: its shape and format.
    """

    file: OpenFile
    name: str
    start: int
    geometry: Geometry

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.geometry.num_bytes

    def __call__(self) -> Tensor:
        """The tensor, mapped; copied where it lies across the addresses of its format, as in older files."""
        memory = self.file.mapped(self.start, self.num_bytes)
        if self.start % self.geometry.dtype.itemsize:
            memory = memory.clone()
        return self.geometry.of_memory(memory.untyped_storage())

    def look(self) -> str:
        """Its name, its shape and some of its numbers."""
        return _look(self.name, self())

    def __str__(self) -> str:
        return f"{self.name} of {self.file.path}"


@dataclass(frozen=True, eq=False)
class LoadedTensor:
    """A tensor of a torch file, which torch has mapped, or read where the file is of before torch 1.6."""

    name: str
    tensor: Tensor

    @property
    def geometry(self) -> Geometry:
        """Its own."""
        return Geometry.of(self.tensor)

    @property
    def num_bytes(self) -> int:
        """Of its memory."""
        return self.tensor.untyped_storage().nbytes()

    def __call__(self) -> Tensor:
        """The tensor."""
        return self.tensor

    def look(self) -> str:
        """See `FileTensor`."""
        return _look(self.name, self.tensor)

    def __str__(self) -> str:
        return self.name


def open_tensors(path: Path) -> dict[str, FileTensor | LoadedTensor]:
    """All tensors of a safetensors or torch file by name, none of them read. The format is seen by the content.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else than tensors, or not all of them.
    """
    with open(path, "rb") as opened:
        start = opened.read(9)
        if start.startswith((b"PK", b"\x80")):
            return {name: LoadedTensor(name, each) for name, each in _loaded(path, start).items()}
        if start[8:] == b"{":
            opened.seek(0)
            header = header_of(opened)
            file = OpenFile(path)
            return {
                name: FileTensor(file, name, first, geometry)
                for name, (first, geometry) in listed_tensors(path, header).items()
            }
    raise ValueError(
        f"{path} is neither a safetensors nor a torch file, since it begins with {start!r}: give one of these, or the "
        "folder of a model"
    )


def header_of(file: BinaryIO) -> bytes:
    """The bytes of a safetensors file in front of the tensors; fewer than they say where the file is shorter."""
    first = file.read(8)
    length = min(int.from_bytes(first, "little"), os.fstat(file.fileno()).st_size)
    return first + file.read(length)


def listed_tensors(path: Path, header: bytes) -> dict[str, tuple[int, Geometry]]:
    """The first byte and the shape of every tensor of a safetensors file, in their order there.

    Raises:
        ValueError: the header is damaged, or the file does not end where the tensors do; names it.
    """
    try:
        listing = json.loads(header[8:])
        listing.pop("__metadata__", None)
        found = {name: _listed(each, len(header)) for name, each in listing.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has no header of safetensors, or a damaged one: {error!r}") from error
    end = max((first + geometry.num_bytes for first, geometry in found.values()), default=len(header))
    if (size := path.stat().st_size) != end:
        raise ValueError(f"{path} is damaged: it ends after {size} bytes, and its tensors after {end}")
    return found


def _listed(listed: Mapping[str, Any], first: int) -> tuple[int, Geometry]:
    geometry = Geometry.dense(DTYPES[listed["dtype"]], listed["shape"])
    start, end = listed["data_offsets"]
    if start < 0 or end - start != geometry.num_bytes:
        raise ValueError(f"a tensor of shape {listed['shape']} does not take bytes {start} to {end}")
    return first + start, geometry


def _loaded(path: Path, start: bytes) -> dict[str, Tensor]:
    try:
        with _disable_current_modes():  # of LazyInitContext
            found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=start.startswith(b"PK"))
    except OSError:
        raise
    except Exception as error:  # torch raises several kinds, of zip, pickle and its own
        raise ValueError(f"torch cannot load {path} as a file of tensors alone: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        entries = type(found).__name__ if not isinstance(found, dict) else sorted(map(str, found))[:8]
        raise ValueError(
            f"{path} holds something else than tensors by name ({entries}): save a state_dict alone"
        )
    odd = [name for name, each in found.items() if each.layout is not torch.strided or each.is_quantized]
    if odd:
        raise ValueError(f"{path} holds sparse or quantized tensors: {', '.join(odd)}: save dense ones")
    return {name: each.detach() for name, each in found.items()}


def _look(name: str, tensor: Tensor) -> str:
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
    samples = flat[:: max(1, flat.numel() // _SAMPLES)].clone().view(torch.uint8)
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {samples.numpy().tobytes().hex()}"
