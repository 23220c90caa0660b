"""Model files in torch's own format, `.bin`: all tensors of a file are in memory until it is written."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from .tensor_file import Entry, FileRecord

_CHUNK = 2**24


class TorchFileWriter:
    """Takes what `TensorFileWriter` takes, and writes it at the end.

    Args:
        path: the file, which is made anew.
        entries: what will be written, in the order of `write`.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self._names = [entry.name for entry in reversed(entries)]
        self._tensors: dict[str, Tensor] = {}

    def write(self, tensor: Tensor) -> None:
        """Take the next one."""
        self._tensors[self._names.pop()] = tensor.detach().cpu().clone()

    def finish(self) -> FileRecord:
        """Have all on the disk.

        Raises:
            OSError: it cannot be written.
        """
        digest = xxhash.xxh3_128()
        with open(self.path, "wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())
        with open(self.path, "rb") as file:
            while content := file.read(_CHUNK):
                digest.update(content)
        return FileRecord(bytes=self.path.stat().st_size, hash=digest.hexdigest())

    def abandon(self) -> None:
        """Forget what was taken."""
        self._tensors.clear()
