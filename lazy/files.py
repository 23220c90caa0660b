"""Tensors in files, mapped into memory one by one. Which files make up a model is decided above.

[Note: mapping] A tensor is mapped when it is read and let go with what was made of it, so only the pages that somebody
looked at count, and only as long. The file is kept open, so it may be replaced or deleted meanwhile; not changed.
"""

import json
import mmap
import os
import sys
import weakref
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from .value import Geometry

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
_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_SAMPLES = 64


class OpenFile:
    """A file that is open for reading, and refuses once it was changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.descriptor)
        self._state = self._present_state()

    @property
    def num_bytes(self) -> int:
        """How long it was when it was opened."""
        return self._state[0]

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
    """A tensor in a file; see [Note: mapping].

    Args:
        file: the file.
        name: of the tensor there.
        start: the byte of the file at which its memory begins.
        geometry: where in that memory its entries are; the first at its beginning.
    """

    file: OpenFile
    name: str
    start: int
    geometry: Geometry

    @property
    def num_bytes(self) -> int:
        """How many bytes of the file its entries span."""
        return self.geometry.num_bytes

    def __call__(self) -> Tensor:
        """The tensor, mapped; where it lies across the addresses of its format, as older files have it, copied."""
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
class ReadTensor:
    """A tensor of a file that cannot be mapped, which is in memory already."""

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
        """It."""
        return self.tensor

    def look(self) -> str:
        """See `FileTensor`."""
        return _look(self.name, self.tensor)

    def __str__(self) -> str:
        return self.name


def open_tensors(path: Path) -> dict[str, FileTensor | ReadTensor]:
    """All tensors of a file by name, none of them read. Whether it is a safetensors or a torch file shows its content.

    Torch files of before 2020 (torch below 1.6) cannot be mapped: they are read whole, and stay in memory until their
    last tensor is dropped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else than tensors, or not all of them.
    """
    file = OpenFile(path)
    start = bytes(file.mapped(0, min(file.num_bytes, 9)).tolist())
    if start.startswith(b"PK"):
        return dict(_of_torch(file))
    if start.startswith(b"\x80"):
        return dict(_of_old_torch(path))
    if start[8:] == b"{":
        return dict(_of_safetensors(file))
    raise ValueError(
        f"{path} is neither a safetensors nor a torch file, since it begins with {start!r}: give one of these, or the "
        "folder of a model"
    )


def _of_safetensors(file: OpenFile) -> dict[str, FileTensor]:
    length = int.from_bytes(bytes(file.mapped(0, 8).tolist()), "little")
    if length > min(_LARGEST_HEADER, file.num_bytes - 8):
        raise ValueError(
            f"{file.path} is no safetensors file, or a part of one: its header has {length} bytes"
        )
    try:
        header = json.loads(file.mapped(8, length).numpy().tobytes())
    except ValueError as error:
        raise ValueError(f"the header of {file.path} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    found, faults = {}, []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            faults.append(f"{name} has the format {entry['dtype']}, for which torch has none")
            continue
        found[name] = FileTensor(file, name, 8 + length + begin, Geometry.dense(dtype, entry["shape"]))
        if found[name].num_bytes != end - begin:
            faults.append(f"{name} has {end - begin} bytes, and its shape {entry['shape']} takes other ones")
    return _complete(file, found, faults)


def _of_torch(file: OpenFile) -> dict[str, FileTensor]:
    with zipfile.ZipFile(file.path) as records:
        orders = [records.read(name).decode() for name in records.namelist() if name.endswith("/byteorder")]
    if orders and orders[0] != sys.byteorder:
        raise ValueError(f"{file.path} was written by a {orders[0]}-endian machine, and this one is not")
    found, faults = {}, []
    for name, tensor in _loaded(file.path, "meta").items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            faults.append(f"{name} is of layout {tensor.layout} and format {tensor.dtype}")
            continue
        begin = tensor.untyped_storage()._checkpoint_offset
        assert begin is not None, "torch tells where a storage is when it loads it onto the meta device"
        start = begin + int(tensor.storage_offset()) * tensor.itemsize
        found[name] = FileTensor(file, name, start, replace(Geometry.of(tensor), offset=0))
    return _complete(file, found, faults)


def _of_old_torch(path: Path) -> dict[str, ReadTensor]:
    return {name: ReadTensor(name, tensor.detach()) for name, tensor in _loaded(path, "cpu").items()}


def _loaded(path: Path, device: str) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, UnpicklingError) as error:
        raise ValueError(f"torch cannot load {path} as a file of tensors alone: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        entries = type(found).__name__ if not isinstance(found, dict) else sorted(map(str, found))[:8]
        raise ValueError(
            f"{path} holds something else than tensors by name ({entries}): save a state_dict alone"
        )
    return found


def _complete(file: OpenFile, found: dict[str, FileTensor], faults: list[str]) -> dict[str, FileTensor]:
    """The tensors, if all are there."""
    end = max((each.start + each.num_bytes for each in found.values()), default=0)
    if end > file.num_bytes:
        faults = [f"it ends after {file.num_bytes} bytes of {end}", *faults]
    if faults:
        raise ValueError(f"{file.path} cannot be read: {'; '.join(faults)}")
    return found


def _look(name: str, tensor: Tensor) -> str:
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
    samples = flat[:: max(1, flat.numel() // _SAMPLES)].clone().view(torch.uint8)
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {samples.numpy().tobytes().hex()}"
