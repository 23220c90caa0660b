"""safetensors files: written tensor by tensor with their hashes, read by boxes. What lies where is the caller's.

The format is https://huggingface.co/docs/safetensors: a length, a JSON header, and the tensors end to end.

[Note: writing early] Linux keeps what is written in memory until it is told to bring it to the disk, and then the
writer waits while its core is idle. So it is told so every few MiB, and the disk works while the next tensors are
hashed and written. That these pages need not be kept afterwards is what the call means by itself.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from ..lazy.files import DTYPES, OpenFile
from .box import Box

ALGORITHM = "xxh3_128"
_CHUNK = 2**24
_EARLY_BYTES = 2**25

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize


class FileRecord(NamedTuple):
    """What a manifest says of a file.

    Args:
        bytes: its length.
        hash: of all of it; None for a file of tensors.
        header: hash of what stands in front of the tensors, of a file of tensors.
        tensors: hash of each tensor's bytes, likewise.
    """

    bytes: int
    hash: str | None = None
    header: str | None = None
    tensors: Mapping[str, str] | None = None


class TensorFileWriter:
    """Writes a file tensor by tensor; nothing but the one at hand is in memory.

    Args:
        path: the file, which is made anew.
        entries: what will be written.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self.order = order_in_file(entries)
        header = _header(self.order)
        self._left = list(reversed(self.order))
        self._hashes: dict[str, str] = {}
        self._header_hash = xxhash.xxh3_128(header).hexdigest()
        self._size = len(header) + sum(entry.nbytes for entry in entries)
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `finish` or `abandon`)
        self._file.write(header)
        self._written, self._on_its_way = len(header), 0

    def write(self, tensor: Tensor) -> None:
        """Write the next one of `order`.

        Raises:
            OSError: it cannot be written.
        """
        entry = self._left.pop()
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise AssertionError(f"{entry} was to be written, not {tensor.dtype} {tuple(tensor.shape)}")
        content = bytes_of(tensor)
        self._hashes[entry.name] = xxhash.xxh3_128(content).hexdigest()
        self._file.write(content)
        self._written += entry.nbytes
        if self._written - self._on_its_way >= _EARLY_BYTES:
            self._write_early()

    def finish(self) -> FileRecord:
        """Have all on the disk."""
        if self._left:
            raise AssertionError(f"{self.path} lacks {[entry.name for entry in self._left]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(bytes=self._size, header=self._header_hash, tensors=self._hashes)

    def _write_early(self) -> None:
        """Let the disk begin; see [Note: writing early]."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):
            length = self._written - self._on_its_way
            os.posix_fadvise(self._file.fileno(), self._on_its_way, length, os.POSIX_FADV_DONTNEED)
        self._on_its_way = self._written

    def abandon(self) -> None:
        """Close it as it is."""
        try:
            self._file.close()
        except OSError:  # what was left to write cannot be, either
            self._file.raw.close() if not self._file.raw.closed else None


class TensorFile:
    """A file to be read by boxes; `Stored`. What is not read takes no memory; see [Note: mapping] in lazy/files.py.

    Raises:
        ValueError: it is no safetensors file, or is cut short; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header_size, self._entries = _read_header(path)
        self.size = max(
            [self.header_size, *(start + entry.nbytes for entry, start in self._entries.values())]
        )
        if (found := path.stat().st_size) != self.size:
            raise ValueError(f"{path} has {found} bytes, and its header speaks of {self.size}: it is damaged")
        self._file = OpenFile(path)

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        return self._entries[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """The format of one."""
        return self._entries[name][0].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one, in memory of its own."""
        return self.mapped(name)[box.within(Box.whole(self.shape(name)))].clone()

    def mapped(self, name: str) -> Tensor:
        """One as it lies in the file: in memory are the parts that were used, for as long as it is held."""
        entry, start = self._entries[name]
        content = self._file.mapped(start, entry.nbytes)
        if start % entry.dtype.itemsize:  # as other writers leave it
            content = content.clone()
        return content.view(entry.dtype).view(entry.shape)


def damage_of_tensors(path: Path, record: FileRecord) -> list[str]:
    """What of a file is not as a manifest says it: names of tensors, or "the header". Read a stretch at a time.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        header = _header_bytes(file)
        if xxhash.xxh3_128(header).hexdigest() != record.header:
            return ["the header"]
        hashes = record.tensors or {}
        return [
            entry.name
            for entry, start in _entries_of(path, header).values()
            if _hash_from(file, start, entry.nbytes) != hashes.get(entry.name)
        ]


def order_in_file(entries: Sequence[Entry]) -> list[Entry]:
    """Wide formats first: so each begins at a multiple of its own width."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes; without a copy where it is on the CPU and lies end to end."""
    return _buffer(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))


def _buffer(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's is a buffer from Python 3.12 on, for mypy


def write_small(path: Path, content: bytes) -> FileRecord:
    """Write a file that is no file of tensors, and have it on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=len(content), hash=xxhash.xxh3_128(content).hexdigest())


def dtype_name(dtype: torch.dtype) -> str:
    """A format by torch's name: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The format of torch's name.

    Raises:
        ValueError: there is none of that name in files.
    """
    found = {dtype_name(dtype): dtype for dtype in _NAMES}.get(name)
    if found is None:
        raise ValueError(f"{name!r} is no format of tensors in files")
    return found


def dtype_faults(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Errors for the tensors of formats that safetensors files do not have."""
    return [
        f"{name} is {dtype}, which safetensors files cannot hold: use another format"
        for name, dtype in dtypes.items()
        if dtype not in _NAMES
    ]


def _header(order: Sequence[Entry]) -> bytes:
    listing: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in order:
        end = start + entry.nbytes
        listing[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(listing, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _hash_from(file: BinaryIO, start: int, length: int) -> str:
    """Of some bytes of a file, which are read one after the other and not mapped."""
    digest = xxhash.xxh3_128()
    file.seek(start)
    while length and (content := file.read(min(length, _CHUNK))):
        digest.update(content)
        length -= len(content)
    return digest.hexdigest()


def _header_bytes(file: BinaryIO) -> bytes:
    """The bytes in front of the tensors; fewer than they say where the file is shorter."""
    first = file.read(8)
    length = min(int.from_bytes(first, "little"), os.fstat(file.fileno()).st_size)
    return first + file.read(length)


def _read_header(path: Path) -> tuple[int, dict[str, tuple[Entry, int]]]:
    """How many bytes stand in front of the tensors, and what they say; see `_entries_of`."""
    with open(path, "rb") as file:
        header = _header_bytes(file)
    return len(header), _entries_of(path, header)


def _entries_of(path: Path, header: bytes) -> dict[str, tuple[Entry, int]]:
    """The tensors of a file, and where in it each begins, in their order there."""
    try:
        listing = json.loads(header[8:])
        listing.pop("__metadata__", None)
        return {name: _entry(name, each, len(header)) for name, each in listing.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has no header of safetensors, or a damaged one: {error!r}") from error


def _entry(name: str, listed: Mapping[str, Any], first: int) -> tuple[Entry, int]:
    entry = Entry(name, tuple(listed["shape"]), DTYPES[listed["dtype"]])
    start, end = listed["data_offsets"]
    if start < 0 or end - start != entry.nbytes:
        raise ValueError(f"{entry} does not take bytes {start} to {end}")
    return entry, first + start
