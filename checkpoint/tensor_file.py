"""Write the files of a checkpoint with their hashes: tensors as safetensors or in torch's format, and plain values.

The format of safetensors (https://huggingface.co/docs/safetensors): a length, a JSON header, and the tensors without
gaps. lazy/files.py reads them.
"""

import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

ALGORITHM = "xxh3_128"
_CHUNK = 2**24
_METADATA = "__metadata__"  # key of a header that is no tensor

# Names of dtypes in safetensors.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class Entry(NamedTuple):
    """Name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class FileRecord(NamedTuple):
    """The entry of a file in a manifest.

    Args:
        bytes: size of the file.
        hash: hash of the file; None for a safetensors file.
        header: hash of the bytes before the tensors; safetensors files only.
        tensors: hash of each tensor's bytes, by name; safetensors files only.
    """

    bytes: int
    hash: str | None = None
    header: str | None = None
    tensors: Mapping[str, str] | None = None


Records = dict[str, FileRecord]  # by file name
Write = Callable[[Path], Records]  # all ranks write into a folder; returns the records of this rank's files


class TensorFileWriter:
    """Write a safetensors file tensor by tensor, with one tensor in memory at a time.

    Args:
        path: the file; an existing one is overwritten.
        entries: the tensors that will be written.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self.order = order_in_file(entries)
        header = _header(self.order)
        self._left = list(reversed(self.order))
        self._hashes: dict[str, str] = {}
        self._header_hash = hash_of_bytes(header)
        self._size = len(header) + sum(entry.nbytes for entry in entries)
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `finish` or `abandon`)
        self._file.write(header)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor of `order`.

        Raises:
            OSError: the write failed.
        """
        entry = self._left.pop()
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise AssertionError(f"{entry} was to be written, not {tensor.dtype} {tuple(tensor.shape)}")
        content = bytes_of(tensor)
        self._hashes[entry.name] = hash_of_bytes(content)
        self._file.write(content)

    def finish(self) -> FileRecord:
        """Flush the file to disk, close it and return its record."""
        if self._left:
            raise AssertionError(f"{self.path} lacks {[entry.name for entry in self._left]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(bytes=self._size, header=self._header_hash, tensors=self._hashes)

    def abandon(self) -> None:
        """Close the incomplete file."""
        try:
            self._file.close()
        except OSError:  # the buffered rest cannot be written, either
            if not self._file.raw.closed:
                self._file.raw.close()


class TorchFileWriter:
    """`TensorFileWriter` for torch's own format: all tensors of the file stay in memory until it is written.

    Args:
        path: the file; an existing one is overwritten.
        entries: the tensors that will be written, in this order.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self._names = [entry.name for entry in reversed(entries)]
        self._tensors: dict[str, Tensor] = {}

    def write(self, tensor: Tensor) -> None:
        """Copy the next tensor."""
        self._tensors[self._names.pop()] = tensor.detach().cpu().clone()

    def finish(self) -> FileRecord:
        """Write the file, flush it to disk and return its record.

        Raises:
            OSError: the write failed.
        """
        with open(self.path, "wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())
        return FileRecord(bytes=self.path.stat().st_size, hash=hash_of(self.path))

    def abandon(self) -> None:
        """Drop the tensors."""
        self._tensors.clear()


def damage_of_tensors(path: Path, record: FileRecord) -> list[str]:
    """Return the tensors of a file (or "the header") whose hash is not that of the manifest. Reads in chunks.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        header = file.read(8)
        header += file.read(min(int.from_bytes(header, "little"), record.bytes))
        if hash_of_bytes(header) != record.header:
            return ["the header"]
        listing = json.loads(header[8:])
        places = {name: listed["data_offsets"] for name, listed in listing.items() if name != _METADATA}
        hashes = record.tensors or {}
        return [
            name
            for name, (start, end) in places.items()
            if _hash_from(file, len(header) + start, end - start) != hashes.get(name)
        ]


def order_in_file(entries: Sequence[Entry]) -> list[Entry]:
    """Sort tensors by item size, largest first, so that each is aligned to its item size."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes; without a copy if it is contiguous and on the CPU."""
    return _buffer(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))


def _buffer(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's is a buffer from Python 3.12 on, for mypy


def write_small(path: Path, content: bytes) -> FileRecord:
    """Write a small file at once, flush it to disk and return its record."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=len(content), hash=hash_of_bytes(content))


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name of torch's.

    Raises:
        ValueError: no dtype of that name exists in safetensors files.
    """
    dtype = {dtype_name(known): known for known in _NAMES}.get(name)
    if dtype is None:
        raise ValueError(f"{name!r} is not a format of tensors in files")
    return dtype


def dtype_errors(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return an error for each tensor whose dtype safetensors does not support."""
    return [
        f"{name} is {dtype}, which safetensors files cannot store: use another format"
        for name, dtype in dtypes.items()
        if dtype not in _NAMES
    ]


def _header(order: Sequence[Entry]) -> bytes:
    """Return the header of a safetensors file: its length, and the tensors' places as JSON, padded to 8 bytes."""
    listing: dict[str, Any] = {_METADATA: {"format": "pt"}}
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


def _new_hash(content: bytes | memoryview = b"") -> Any:
    """Return an incremental hash. Imported here because training itself does not need xxhash."""
    import xxhash

    return xxhash.xxh3_128(content)


def hash_of_bytes(content: bytes | memoryview) -> str:
    """Return the hash of bytes."""
    return str(_new_hash(content).hexdigest())


def hash_of(path: Path) -> str:
    """Return the hash of a file."""
    with open(path, "rb") as file:
        return _hash_from(file, 0, path.stat().st_size)


def _hash_from(file: BinaryIO, start: int, length: int) -> str:
    """Return the hash of a range of a file, read in chunks and not memory-mapped."""
    digest = _new_hash()
    file.seek(start)
    while length and (content := file.read(min(length, _CHUNK))):
        digest.update(content)
        length -= len(content)
    return str(digest.hexdigest())


def loadable_bytes(values: Any) -> bytes:
    """Serialize plain values and tensors in torch's own format, and require that loading them executes no code.

    Raises:
        ValueError: they contain another type, which could only be loaded by executing code from the file.
    """
    try:
        content = torch_save_bytes(values)
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch raises several kinds, of pickle and its own
        raise ValueError(
            "a checkpoint can contain only tensors and plain values (numbers, str, lists, tuples, dicts), but got "
            f"{_unsafe(error)}"
        ) from error
    return content


def value_errors(values: Any, what: str) -> list[str]:
    """Return the error of `loadable_bytes` as a list; empty if the values can be saved."""
    try:
        loadable_bytes(values)
    except ValueError as error:
        return [f"{what} cannot be saved: {error}"]
    return []


def _unsafe(error: Exception) -> str:
    """Return the rejected class or the reason, extracted from torch's longer message if possible."""
    text = str(error)
    match = re.search(r"GLOBAL (\S+)", text) or re.search(r"WeightsUnpickler error:\s*([^\n]+)", text)
    return match[1] if match else f"{type(error).__name__}: {text}"


def torch_save_bytes(values: Any) -> bytes:
    """Serialize values in torch's own format, unchecked; see `loadable_bytes`."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def write_values(path: Path, values: Any) -> FileRecord:
    """Write plain values to a file; see `loadable_bytes`."""
    return write_small(path, loadable_bytes(values))


def read_values(path: Path) -> Any:
    """Read plain values from a file.

    Raises:
        OSError: the file does not exist, or this process may not read it.
        ValueError: the file is damaged; names it.
    """
    content = path.read_bytes()
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds, of zip, pickle and its own
        raise ValueError(
            f"{path} cannot be read, it is damaged or not written by Echelon: {_unsafe(error)}"
        ) from error
